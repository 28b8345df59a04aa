"""Worker processes of one run on this machine: stacks are handed out, results come back in the stacks' order.

Stacks are fixed by the clients' order and each worker computes with one thread, so the bits of a run depend
neither on how many workers there are nor on which of them dies. Only the driver writes the ledger: work is
reserved before it is handed out and settled as it comes back. A stack whose worker died is handed out again under
the same reservations; nobody else has it then, so that one answer counts.
"""

from __future__ import annotations

import copy
import logging
import pickle
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.multiprocessing as processes

from modicum.core.parts import Batch, Job, Scope
from modicum.core.records import each
from modicum.errors import UserError
from modicum.federation.worker import Results, Shelf, Task, Workshop, light, serve, shared, unpacked

if TYPE_CHECKING:
    from modicum.federation.setup import RunContext
    from modicum.privacy.noise import NoiseSource

LOG = logging.getLogger("modicum.workers")
STACK = 32  # clients of a stack at most: part of what a run with workers computes, whatever their number
AHEAD = 2  # stacks for each worker that may be done before their turn: they wait in memory
DEATHS = 10  # of workers over one stack, after which it is the stack that kills
PATIENCE = 10.0  # seconds for a worker to end by itself


@dataclass
class Worker:
    """One process, and the stack that it is computing."""

    process: Any
    connection: Connection
    stack: int | None = None


class Workers:
    """Computes stacks in `count` processes, which begin with the first stack and end with `close`."""

    def __init__(self, context: RunContext, noise: NoiseSource, count: int) -> None:
        check(context)
        self._count, self._device = count, context.data.first.device
        self._number = {facts.name: i for i, facts in enumerate(context.facts)}
        self._workers: list[Worker] = []
        self._deaths: dict[int, int] = {}
        devices, nothing = _devices(context.experiment.device), cast("Any", None)
        kit = replace(context.kit, backend=nothing, shared=context.kit.shared.cpu())
        parts = (context.method, kit, copy.deepcopy(context.data.model).cpu(), noise)
        _check_travels(parts)
        made_up = context.data.made_up
        self._workshop = Workshop(
            *parts,
            Shelf.of(context.data.records),
            Shelf.of(context.data.validation),
            context.data.first.detach().cpu(),
            None
            if made_up is None
            else Batch(*(each(lambda t: t.cpu(), part) for part in (made_up.x, made_up.targets))),
            shared(context.data.first[context.kit.shared].detach().cpu().clone()),
            devices,
            0.9 / -(-count // len(devices)),
        )

    def sharing(self, context: RunContext) -> RunContext:
        """The run with its stacks cut for workers, and its records in the memory that they share: one copy."""
        shelves, clients = (self._workshop.records, self._workshop.validation), range(len(context.facts))
        own, held_out = (tuple(shelf.batch(i) for i in clients) for shelf in shelves)
        data = replace(context.data, records=own, validation=held_out)
        return replace(context, data=data, at_once=min(context.at_once, STACK))

    def _start(self, number: int) -> Worker:
        here, there = processes.Pipe()
        context = processes.get_context("spawn")
        process = context.Process(target=serve, args=(self._workshop, there, number), daemon=True)
        with _no_main():
            process.start()
        there.close()
        return Worker(process, here)

    def compute(self, stacks: Sequence[Sequence[Job]]) -> Iterator[tuple[Sequence[Job], Results]]:
        """Each stack and what the mechanism made of it, in the order of the stacks."""
        if not stacks:
            return
        while len(self._workers) < self._count:
            self._workers.append(self._start(len(self._workers)))
        self._workshop.place.copy_(stacks[0][0].broadcast.model)
        self._deaths = {}
        left, done = deque(range(len(stacks))), dict[int, Results]()
        try:
            for turn in range(len(stacks)):
                while turn not in done:
                    self._hand_out(stacks, left, turn)
                    done |= self._collect(left)
                self._hand_out(stacks, left, turn)
                yield stacks[turn], done.pop(turn)
        finally:
            for i, worker in enumerate(self._workers):  # a round that was given up: nobody waits for its answers
                if worker.stack is not None:
                    self._replace(i)

    def _hand_out(self, stacks: Sequence[Sequence[Job]], left: deque[int], turn: int) -> None:
        for worker in self._workers:
            if worker.stack is None and left and left[0] < turn + AHEAD * len(self._workers):
                worker.stack = left.popleft()
                with suppress(OSError):  # it died: the next look at it notices
                    worker.connection.send(self._task(worker.stack, stacks[worker.stack]))

    def _task(self, number: int, stack: Sequence[Job]) -> Task:
        clients = tuple(self._number[job.facts.name] for job in stack)
        tokens = tuple(job.gate.tokens for job in stack)
        return Task(number, stack[0].broadcast.round, clients, tuple(light(job) for job in stack), tokens)

    def _collect(self, left: deque[int]) -> Mapping[int, Results]:
        """Answers, once there is one; workers that died are replaced, and their stacks done again."""
        busy = {i: worker for i, worker in enumerate(self._workers) if worker.stack is not None}
        ready = wait([part for w in busy.values() for part in (w.connection, w.process.sentinel)])
        found = {}
        for i, worker in busy.items():
            if worker.connection in ready:
                try:
                    number, results = unpacked(worker.connection.recv_bytes(), self._device)
                except (EOFError, OSError, pickle.UnpicklingError):
                    self._lost(i, left)
                    continue
                worker.stack = None
                if isinstance(results, Exception):
                    raise results
                found[number] = results
            elif worker.process.sentinel in ready:
                self._lost(i, left)
        return found

    def _lost(self, i: int, left: deque[int]) -> None:
        stack = self._workers[i].stack
        assert stack is not None
        self._deaths[stack] = self._deaths.get(stack, 0) + 1
        if self._deaths[stack] > DEATHS:
            raise UserError(
                "worker processes die over the same clients, as when memory runs out: go on with fewer workers"
            )
        LOG.warning("a worker process died: its clients are computed again, under the same reservations")
        left.appendleft(stack)
        self._replace(i)

    def _replace(self, i: int) -> None:
        self._end(self._workers[i])
        self._workers[i] = self._start(i)

    def _end(self, worker: Worker) -> None:
        worker.connection.close()
        worker.process.kill()
        worker.process.join()

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []


def check(context: RunContext) -> None:
    """Refuse what cannot be handed out."""
    if context.experiment.compile:
        raise UserError("compiled sums may differ from process to process: leave out compile, or workers")
    if context.kit.policy.scope is Scope.STEP:
        raise UserError(
            f"{context.method.name} decides before each step and reserves each step by itself, which only one "
            "process can do in order: leave workers out"
        )


def _check_travels(parts: object) -> None:
    """Before anything is reserved: whether other processes can be told of method and model."""
    try:
        with _no_main():
            pickle.dumps(parts)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"method or model cannot be sent to worker processes ({error}): define them in a module that can be "
            "imported, or leave workers out"
        ) from None


def _devices(name: str) -> tuple[str, ...]:
    """Where workers compute, in turns: on all GPUs, unless one is named."""
    if name != "cuda":
        return (name,)
    return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))


@contextmanager
def _no_main() -> Iterator[None]:
    """Workers need nothing of the program that was started: without this each would run a script from its top."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
