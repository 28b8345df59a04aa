"""Ordinary local training inside a client, before its whole update is clipped or sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modicum.core.parts import Batch, Frame, Job
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
    records = [_with_targets(jobs[i], frame) for i in order]
    streams = [_minibatches(len(r), local.batch, jobs[i].seed) for i, r in zip(order, records, strict=True)]
    theta, optimiser = first[order].clone(), frame.training.optimiser
    buffers = [torch.zeros_like(theta) for _ in range(optimiser.slots)]
    for step in range(counts[0]):
        active = sum(step < n for n in counts)
        rows = slice(0, active)
        batches = [r.take(next(s)) for r, s in zip(records[rows], streams[rows], strict=True)]
        gradient = _gradients(theta[rows], batches, frame, local.ascent)
        optimiser.step(theta[rows], gradient, [b[rows] for b in buffers], step)
    back = torch.empty_like(theta)
    back[order] = theta
    return back


def _gradients(theta: Tensor, batches: Sequence[Batch], frame: Frame, ascent: float) -> Tensor:
    gradient = frame.backend.gradients(theta, batches, frame.training.losses)
    if not ascent:
        return gradient
    norms = gradient.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return frame.backend.gradients(theta + ascent * gradient / norms, batches, frame.training.losses)


def _with_targets(job: Job, frame: Frame) -> Batch:
    return Batch(job.records.x, frame.training.targets(job.records, job.state, frame.backend))


def _minibatches(records: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Shuffled passes cut into batches; a new pass begins when fewer than a batch are left."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    size = min(batch, records)
    while True:
        order = torch.from_numpy(rng.permutation(records))
        for i in range(math.floor(records / size)):
            yield order[i * size : (i + 1) * size]
