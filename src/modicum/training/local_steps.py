"""Ordinary local training inside a client, before its whole update is clipped or sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from modicum.core.extension_points import ProximalTerm
from modicum.core.optimisers import Sgd
from modicum.core.parts import Batch, ClientKit, Descends, Job
from modicum.core.stack import Pool, SideBySide
from modicum.errors import UserError
from modicum.training.descent import Descent


@dataclass(frozen=True)
class LocalSteps:
    """How long a client trains in one round: `steps` minibatches, or `epochs` passes over its records."""

    batch: int = 64
    steps: int | None = None
    epochs: float = 1.0
    ascent: float = 0.0  # sharpness-aware: radius of the step uphill before each gradient (Foret et al. 2021)

    def __post_init__(self) -> None:
        if self.batch < 1 or (self.steps is not None and self.steps < 1) or not self.epochs > 0:
            raise UserError("local training needs a batch size, steps and epochs above 0")

    def count(self, records: int) -> int:
        """Steps of a client with so many records: as told, or those of `epochs` passes, at least one."""
        if self.steps is not None:
            return self.steps
        return max(1, round(self.epochs * records / min(self.batch, records)))


def train_locally(jobs: Sequence[Job], first: Tensor, kit: ClientKit, local: LocalSteps) -> Tensor:
    """The local models after training, one row a client; private, since no noise was added."""
    order = sorted(range(len(jobs)), key=lambda i: -local.count(len(jobs[i].records)))
    shuffle = Shuffle()
    taken = [_taken(jobs[i], kit, local, shuffle) for i in order]
    in_order = order == list(range(len(jobs)))  # then two copies of every model are saved
    theta = first if in_order else first[order]
    optimiser = kit.training.optimiser
    more = local.ascent or isinstance(kit.training, ProximalTerm)
    rate = optimiser.lr if isinstance(optimiser, Sgd) and not (optimiser.momentum or more) else None
    if rate is not None and isinstance(kit.backend, Descends):
        for clients, steps in groupby(_batches(taken), len):
            trained = kit.backend.descend(theta[:clients], list(steps), kit.training.losses, rate)
            theta = trained if clients == len(theta) else torch.cat([trained, theta[clients:]])
    else:
        descent = Descent(theta, optimiser, kit.training)
        theta = descent.theta
        for step, batches in enumerate(_batches(taken)):
            descent.step(step, _gradients(theta[: len(batches)], batches, kit, local.ascent))
    if in_order:
        return theta
    back = torch.empty_like(theta)
    back[order] = theta
    return back


@dataclass(frozen=True)
class _Taken:
    """What one client's round needs: records with their targets, and (steps, size) their rows in each step."""

    records: Batch
    rows: Tensor
    in_order: bool  # the rows are 0, 1, 2, …


def _batches(taken: Sequence[_Taken]) -> Iterator[Sequence[Batch]]:
    """Each step's batches, of the clients that are still at work: always the first ones."""
    records = [t.records for t in taken]
    shapes = {t.rows.shape for t in taken}
    if len(shapes) == 1 and all(t.in_order for t in taken) and records[0].device.type != "cuda":
        yield from SideBySide.steps(records, len(taken[0].rows))
        return
    pool = Pool(records)
    for step in range(len(taken[0].rows)):
        yield pool.batches([t.rows[step] for t in taken if step < len(t.rows)])


def _gradients(theta: Tensor, batches: Sequence[Batch], kit: ClientKit, ascent: float) -> Tensor:
    """At each client's model, or at `ascent` uphill of it: w + ρ·g/‖g‖ (Foret et al. 2021)."""
    gradient = kit.backend.gradients(theta, batches, kit.training.losses)
    if not ascent:
        return gradient
    norms = gradient.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return kit.backend.gradients(theta + ascent * gradient / norms, batches, kit.training.losses)


def _taken(job: Job, kit: ClientKit, local: LocalSteps, shuffle: Shuffle) -> _Taken:
    """Targets may be costly (a teacher's outputs), so a round of less than a pass has them for its own records."""
    records = job.records
    rows = _minibatches(len(records), local.batch, shuffle.of(job.seed), local.count(len(records)))
    less = rows.numel() < len(records)
    if less:
        records = records.take(rows.flatten())
        rows = torch.arange(len(records)).view(rows.shape)
    return _Taken(Batch(records.x, kit.training.targets(records, job.state, kit.backend)), rows, less)


class Shuffle:
    """One generator that is set to the beginning of any seed's stream: a new one for each client takes longer."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._start = self._bits.state
        self._rng = np.random.Generator(self._bits)

    def of(self, seed: int) -> np.random.Generator:
        """The generator of this seed, until the next one is asked for."""
        self._start["state"]["key"][:] = seed & (2**64 - 1), seed >> 64
        self._bits.state = self._start
        return self._rng


def _minibatches(records: int, batch: int, rng: np.random.Generator, steps: int) -> Tensor:
    """(steps, size) rows: shuffled passes cut into batches; a new pass begins when fewer than a batch are left."""
    size = min(batch, records)
    used = records // size * size
    passes = [rng.permutation(records)[:used] for _ in range(math.ceil(steps * size / used))]
    return torch.from_numpy(np.concatenate(passes)[: steps * size].reshape(steps, size))
