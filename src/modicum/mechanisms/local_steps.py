"""Ordinary local training inside a client, before its whole update is clipped or sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from modicum.core.parts import Batch, Frame, Job
from modicum.core.stack import Pool
from modicum.errors import UserError


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
        if self.steps is not None:
            return self.steps
        return max(1, round(self.epochs * records / min(self.batch, records)))


def train_locally(jobs: Sequence[Job], first: Tensor, frame: Frame, local: LocalSteps) -> Tensor:
    """The local models after training, one row a client; private, since no noise was added."""
    order = sorted(range(len(jobs)), key=lambda i: -local.count(len(jobs[i].records)))
    counts = [local.count(len(jobs[i].records)) for i in order]
    taken = [_taken(jobs[i], frame, local) for i in order]
    pool = Pool([records for records, _ in taken])
    in_order = order == list(range(len(jobs)))  # then two copies of every model are saved
    theta, optimiser = first.clone() if in_order else first[order], frame.training.optimiser
    buffers = [torch.zeros_like(theta) for _ in range(optimiser.slots)]
    for step in range(counts[0]):
        active = sum(step < n for n in counts)
        rows = slice(0, active)
        batches = pool.batches([minibatches[step] for _, minibatches in taken[rows]])
        gradient = _gradients(theta[rows], batches, frame, local.ascent)
        optimiser.step(theta[rows], gradient, [b[rows] for b in buffers], step)
    if in_order:
        return theta
    back = torch.empty_like(theta)
    back[order] = theta
    return back


def _gradients(theta: Tensor, batches: Sequence[Batch], frame: Frame, ascent: float) -> Tensor:
    gradient = frame.backend.gradients(theta, batches, frame.training.losses)
    if not ascent:
        return gradient
    norms = gradient.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return frame.backend.gradients(theta + ascent * gradient / norms, batches, frame.training.losses)


def _taken(job: Job, frame: Frame, local: LocalSteps) -> tuple[Batch, list[Tensor]]:
    """The records that a round's minibatches need, with their targets, and each minibatch's rows among them.

    Targets may be costly (a teacher's outputs), so a round of less than a pass has them for what it takes only.
    """
    records, size = job.records, min(local.batch, len(job.records))
    stream = _minibatches(len(records), local.batch, job.seed)
    minibatches = list(islice(stream, local.count(len(records))))
    if len(minibatches) * size < len(records):
        records = records.take(torch.cat(minibatches).to(records.x.device))
        minibatches = list(torch.split(torch.arange(len(records)), size))
    return Batch(records.x, frame.training.targets(records, job.state, frame.backend)), minibatches


def _minibatches(records: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Shuffled passes cut into batches; a new pass begins when fewer than a batch are left."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    size = min(batch, records)
    while True:
        order = torch.from_numpy(rng.permutation(records))
        for i in range(math.floor(records / size)):
            yield order[i * size : (i + 1) * size]
