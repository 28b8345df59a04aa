"""Workers of one run: stacks are handed out, and results come back in the stacks' order.

Stacks are fixed by the clients' order and each worker computes with one thread, so the bits of a run depend
neither on how many workers there are, nor where they are, nor on which of them dies. Only the driver writes the
ledger: work is reserved before it is handed out and settled as it comes back. A stack whose worker died, or keeps
everybody waiting, is handed out again under the same reservations. It is one release all the same: its first
answer counts, and a second one is dropped unread.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import pickle
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor

from modicum.core.parts import Batch, Job, Scope
from modicum.core.records import each
from modicum.errors import UserError
from modicum.federation.cluster import Cluster
from modicum.federation.processes import Processes, no_main
from modicum.federation.worker import Results, Shelf, Task, Workshop, light, ordinary, shared, unpacked

if TYPE_CHECKING:
    from modicum.federation.setup import RunContext
    from modicum.privacy.noise import NoiseSource

LOG = logging.getLogger("modicum.workers")
STACK = 32  # clients of a stack at most: part of what a run with workers computes, whatever their number
STACKS = 16  # of a round at least, where it has so many clients: enough to be shared out evenly
AHEAD = 2  # stacks for each worker that may be done before their turn: they wait in memory
DEATHS = 10  # of workers over one stack, after which it is the stack that kills
LATE = 60.0  # seconds, at least, after which a stack that all wait for is given to somebody else as well
SLOW = 4.0  # times the slowest stack so far, with the same consequence


class Hands(Protocol):
    """Who computes stacks: processes of this machine, or of a cluster."""

    workshop: Workshop  # with the records where whoever computes reads them
    count: int  # stacks at a time

    def begin(self, model: Tensor) -> None:
        """A round begins, with this model."""

    def give(self, task: Task) -> None:
        """Somebody computes this."""

    def wait(self, seconds: float) -> Sequence[tuple[int, bytes | None]]:
        """Numbers of stacks with their answers; None where whoever had it is lost. Empty when time is up."""

    def drop(self) -> None:
        """Nobody waits any more for what is not answered."""

    def close(self) -> None:
        """Everybody may go."""


@dataclass
class Out:
    """What is handed out in a round, and what came of it."""

    left: deque[int]
    copies: Counter[int] = field(default_factory=Counter)  # of a stack that somebody has now
    since: dict[int, float] = field(default_factory=dict)  # when a stack was last given to somebody
    done: dict[int, Results] = field(default_factory=dict)  # before their turn
    answered: set[int] = field(default_factory=set)
    deaths: Counter[int] = field(default_factory=Counter)


class Workers:
    """Computes stacks in several processes, which begin with the first stack and end with `close`."""

    def __init__(self, context: RunContext, noise: NoiseSource, hands: Hands | None = None) -> None:
        check(context)
        e = context.experiment
        self._device = context.data.first.device
        self._number = {facts.name: i for i, facts in enumerate(context.facts)}
        self._slowest: float | None = None
        workshop = _workshop(context, noise)
        if hands is None and e.ray is not None:
            hands = Cluster(workshop, e.ray, e.workers, e.device)
        self._hands = hands or Processes(workshop, e.workers or 1, e.device)

    def sharing(self, context: RunContext) -> RunContext:
        """The run with its stacks cut for workers, and its records where the workers have theirs: one copy."""
        shop, clients = self._hands.workshop, range(len(context.facts))
        own, held_out = (tuple(shelf.batch(i) for i in clients) for shelf in (shop.records, shop.validation))
        data = replace(context.data, records=own, validation=held_out)
        return replace(context, data=data, at_once=in_a_stack(context.cohorts.size, context.at_once))

    def compute(self, stacks: Sequence[Sequence[Job]]) -> Iterator[tuple[Sequence[Job], Results]]:
        """Each stack and what the mechanism made of it, in the order of the stacks."""
        if not stacks:
            return
        self._hands.begin(stacks[0][0].broadcast.model)
        out = Out(deque(range(len(stacks))))
        try:
            for turn in range(len(stacks)):
                while turn not in out.done:
                    self._hand_out(stacks, out, turn)
                    self._collect(out, turn)
                self._hand_out(stacks, out, turn)
                yield stacks[turn], out.done.pop(turn)
        finally:
            self._hands.drop()

    def _hand_out(self, stacks: Sequence[Sequence[Job]], out: Out, turn: int) -> None:
        count = self._hands.count
        while out.copies.total() < count and out.left and out.left[0] < turn + AHEAD * count:
            self._give(stacks, out, out.left.popleft())
        if turn not in out.answered and out.copies[turn] == 1 and out.copies.total() < count:
            limit = self._limit
            if limit is not None and time.monotonic() - out.since[turn] > limit:
                LOG.warning("a worker keeps the round waiting: its clients are given to another one as well")
                self._give(stacks, out, turn)

    @property
    def _limit(self) -> float | None:
        """When a stack is late; before the first has come back nobody knows how long one takes."""
        return None if self._slowest is None else max(LATE, SLOW * self._slowest)

    def _give(self, stacks: Sequence[Sequence[Job]], out: Out, number: int) -> None:
        out.copies[number] += 1
        out.since[number] = time.monotonic()
        self._hands.give(self._task(number, stacks[number]))

    def _task(self, number: int, stack: Sequence[Job]) -> Task:
        clients = tuple(self._number[job.facts.name] for job in stack)
        tokens = tuple(job.gate.tokens for job in stack)
        return Task(number, stack[0].broadcast.round, clients, tuple(light(job) for job in stack), tokens)

    def _collect(self, out: Out, turn: int) -> None:
        """Answers, once there is one; stacks of workers that were lost are to be handed out again."""
        for number, blob in self._hands.wait(self._patience(out, turn)):
            out.copies[number] -= 1
            if number in out.answered:
                LOG.warning("a second answer for the same clients is dropped unread")
            elif blob is None:
                self._lost(out, number)
            else:
                out.answered.add(number)
                self._slowest = max(self._slowest or 0.0, time.monotonic() - out.since[number])
                out.done[number] = _read(blob, self._device)

    def _patience(self, out: Out, turn: int) -> float:
        """Seconds until the stack whose turn it is may be late."""
        limit = self._limit
        if limit is None or turn not in out.since:
            return LATE
        return min(LATE, max(0.01, out.since[turn] + limit - time.monotonic() + 0.01))

    def _lost(self, out: Out, number: int) -> None:
        out.deaths[number] += 1
        if out.deaths[number] > DEATHS:
            raise UserError(
                "worker processes die over the same clients, as when memory runs out: go on with fewer workers"
            )
        LOG.warning("a worker process died: its clients are computed again, under the same reservations")
        if not out.copies[number]:
            out.left.appendleft(number)

    def close(self) -> None:
        """End all processes."""
        self._hands.close()


def in_a_stack(cohort: float, at_once: int) -> int:
    """How many clients of a round are computed together: a function of how many they are, and of the engine."""
    return min(at_once, STACK, math.ceil(cohort / STACKS))


def check(context: RunContext) -> None:
    """Refuse what cannot be handed out."""
    refuse_torchrun()
    if context.experiment.compile:
        raise UserError("compiled sums may differ from process to process: leave out compile, or workers")
    if context.kit.policy.scope is Scope.STEP:
        raise UserError(
            f"{context.method.name} decides before each step and reserves each step by itself, which only one "
            "process can do in order: leave workers out"
        )


def refuse_torchrun() -> None:
    """It starts a program several times, each of which would play, and charge for, a run of its own."""
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "torchrun starts the whole program several times, and ends all of it when one of them dies: start it "
            "once, with --workers N on this machine or --ray ADDRESS on several"
        )


def _workshop(context: RunContext, noise: NoiseSource) -> Workshop:
    nothing, data = cast("Any", None), context.data
    kit = replace(context.kit, backend=nothing, shared=context.kit.shared.cpu())
    parts = (context.method, kit, copy.deepcopy(data.model).cpu(), noise)
    _check_travels(parts)
    tried = data.made_up
    if tried is not None:
        tried = Batch(*(each(lambda t: t.cpu(), part) for part in (tried.x, tried.targets)))
    place = shared if context.experiment.ray is None else ordinary
    records, validation = Shelf.of(data.records, place), Shelf.of(data.validation, place)
    return Workshop(*parts, records, validation, data.first.detach().cpu(), tried)


def _check_travels(parts: object) -> None:
    """Before anything is reserved: whether other processes can be told of method and model."""
    try:
        with no_main():
            pickle.dumps(parts)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"method or model cannot be sent to worker processes ({error}): define them in a module that can be "
            "imported, or leave workers out"
        ) from None


def _read(blob: bytes, device: Any) -> Results:
    results = unpacked(blob, device)
    if isinstance(results, Exception):
        raise results
    return results
