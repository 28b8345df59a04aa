"""One worker process: computes stacks of clients, as it is told, and keeps nothing between them.

It writes no ledger and opens nothing: each job comes with the permission that the driver's ledger gave, and what
the mechanism makes of it goes back to the driver, who settles it.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.client_batched.choose import choose
from modicum.compute.client_batched.fused import FusedBackend
from modicum.core.clips import Flat
from modicum.core.memory import keep_pages
from modicum.core.messages import Message
from modicum.core.own_rows import OwnRows
from modicum.core.parts import Backend, Batch, ClientKit, Job, Method, State
from modicum.core.records import Tree, each
from modicum.core.release_gate import ReservedGate
from modicum.errors import UserError
from modicum.federation.clients import model_randomness, within_memory
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseSource

Results = list[tuple[Message, State]]


def shared(values: Tensor) -> Tensor:
    """The tensor, moved to memory that processes share."""
    try:
        values.share_memory_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UserError(
            f"{values.nbytes:,} bytes of records do not fit into the memory that processes share ({error}): give "
            "the container more (docker run --shm-size), or leave workers out"
        ) from None
    return values


def ordinary(values: Tensor) -> Tensor:
    """The tensor, where it is."""
    return values


@dataclass(frozen=True)
class Shelf:
    """Records of all clients one after another; client i has those from `starts[i]` up to `starts[i + 1]`."""

    x: Tree
    targets: Tree
    starts: Tensor

    @classmethod
    def of(cls, batches: Sequence[Batch], place: Callable[[Tensor], Tensor]) -> Shelf:
        """The one copy of these records, in the memory that `place` gives."""
        starts = torch.tensor([0, *(len(batch) for batch in batches)]).cumsum(0)

        def together(*parts: Tensor) -> Tensor:
            whole = place(parts[0].new_empty((int(starts[-1]), *parts[0].shape[1:]), device="cpu"))
            torch.cat([part.cpu() for part in parts], out=whole)
            return whole

        x, targets = [b.x for b in batches], [b.targets for b in batches]
        return cls(each(together, *x), each(together, *targets), starts)

    def moved(self, move: Callable[[Any], Any]) -> Shelf:
        """The records somewhere else, or as something else."""
        return Shelf(each(move, self.x), each(move, self.targets), self.starts)

    def batch(self, client: int, device: torch.device | str = "cpu") -> Batch:
        """One client's records."""
        rows = slice(int(self.starts[client]), int(self.starts[client + 1]))
        x, targets = (each(lambda t: t[rows].to(device), tree) for tree in (self.x, self.targets))
        return Batch(x, targets)


@dataclass(frozen=True)
class Workshop:
    """What a worker is given once: the parts that compute, and the records."""

    method: Method
    kit: ClientKit  # without a backend: each process makes its own
    model: nn.Module
    noise: NoiseSource
    records: Shelf
    validation: Shelf
    first: Tensor  # all parameters before the run
    made_up: Batch | None  # synthetic rows, to try the engine on


@dataclass(frozen=True)
class Seat:
    """Where a worker computes, and its share of that GPU's memory."""

    device: str
    share: float


@dataclass(frozen=True)
class Task:
    """A stack of jobs without records, gates and models, which would weigh too much to travel."""

    number: int
    round: int
    clients: tuple[int, ...]
    jobs: tuple[Job, ...]
    tokens: tuple[tuple[Token, ...], ...]


def light(job: Job) -> Job:
    """A job that can travel: its records and its model are in shared memory, its permission beside it."""
    nothing: Any = None
    broadcast = replace(job.broadcast, model=nothing)
    return replace(job, records=nothing, validation=nothing, gate=nothing, broadcast=broadcast)


def serve(workshop: Workshop, place: Tensor, connection: Connection, seat: Seat) -> None:
    """Answer tasks until the driver is gone, with one thread: bits do not depend on the number of workers.

    `place` is where the driver lays the round's model.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when it is over
    torch.set_num_threads(1)
    bench = Bench(workshop, seat)
    with suppress(EOFError, OSError):  # also where the driver was killed
        while (task := connection.recv()) is not None:
            connection.send_bytes(answer(bench, task, place))


def answer(bench: Bench, task: Task, model: Tensor) -> bytes:
    """What the mechanism makes of a stack, or what went wrong, which the driver raises."""
    try:
        return _packed(bench.results(task, model))
    except Exception as error:
        return _packed(error)


class Bench:
    """A worker's own engine, and the model of the round."""

    def __init__(self, workshop: Workshop, seat: Seat) -> None:
        self.workshop, self.device = workshop, torch.device(seat.device)
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(seat.share, self.device)
        else:
            keep_pages()
        model = workshop.model.to(self.device)
        several = isinstance(workshop.records.x, Mapping)
        backend: Backend = choose(model, self.device, several=several).backend
        self.kit = replace(workshop.kit, backend=backend, shared=workshop.kit.shared.to(self.device))
        self._try_engine()
        self.round, self.model = -1, workshop.first
        self.rows = OwnRows(workshop.noise if workshop.noise.describe()["simulation"] else None)

    def _try_engine(self) -> None:
        """An engine that judges itself by the first stack it sees would judge otherwise in another worker: it does
        so here, by synthetic rows, the same in all of them."""
        shop, kit = self.workshop, self.kit
        if shop.made_up is None or not isinstance(kit.backend, FusedBackend):
            return
        made = Batch(
            each(lambda t: t.to(self.device), shop.made_up.x),
            {name: t.to(self.device) for name, t in shop.made_up.targets.items()},
        )
        rows = Batch(made.x, kit.training.targets(made, {}, kit.backend))
        theta = shop.first.to(self.device).repeat(2, 1)
        kit.backend.gradients(theta, [rows, rows], kit.training.losses)
        kit.backend.clipped_sums(theta, [rows, rows], kit.training.losses, [Flat().scaled_to(1.0)] * 2)

    def results(self, task: Task, model: Tensor) -> Results:
        """What the mechanism makes of a stack with the round's model, which is copied once a round."""
        if task.round != self.round:
            self.round, self.model = task.round, model.clone().to(self.device)
        shop = self.workshop
        for job in task.jobs:
            self.rows.learn(job.plan)
        jobs = [
            replace(
                job,
                records=shop.records.batch(client, self.device),
                validation=shop.validation.batch(client, self.device),
                broadcast=replace(job.broadcast, model=self.model),
                state=_moved(job.state, self.device),
                gate=ReservedGate(shop.noise, tokens, rows=self.rows),
            )
            for job, client, tokens in zip(task.jobs, task.clients, task.tokens, strict=True)
        ]
        with model_randomness(shop.noise, jobs), within_memory(len(jobs)):
            return shop.method.mechanism.run(jobs, self.kit)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return {k: _moved(v, device) for k, v in value.items()} if isinstance(value, dict) else value


def _packed(results: Results | Exception) -> bytes:
    """Tensors as arrays, which travel faster."""
    packed: Any = results
    if not isinstance(results, Exception):
        arrays: list[Any] = [message.update.cpu().numpy() for message, _ in results]
        packed = [
            (replace(message, update=update), _moved(state, torch.device("cpu")))
            for update, (message, state) in zip(arrays, results, strict=True)
        ]
    try:
        return pickle.dumps(packed, protocol=5)
    except Exception as error:  # what was raised, or kept, cannot travel
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"), protocol=5)


def unpacked(blob: bytes, device: torch.device) -> Results | Exception:
    """A worker's answer, back on the driver's device."""
    results = pickle.loads(blob)
    if isinstance(results, Exception):
        return results
    return [
        (replace(message, update=torch.from_numpy(message.update).to(device)), _moved(state, device))
        for message, state in results
    ]
