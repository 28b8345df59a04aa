"""Local models of several clients on their way downhill: one row each, all steps taken together."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.core.extension_points import ProximalTerm
from modicum.core.optimisers import Optimiser


class Descent:
    """Row i of `theta` is client i's model. A step moves the first rows: those of clients that are still at work.

    `training` may have a `pull`, a function of models alone, which is added to every gradient.
    """

    def __init__(self, first: Tensor, optimiser: Optimiser, training: object = None) -> None:
        self.first, self.theta = first, first.clone(memory_format=torch.contiguous_format)
        self.optimiser = optimiser
        self._pull = training.pull if isinstance(training, ProximalTerm) else None
        self._buffers = [torch.zeros_like(self.theta) for _ in range(optimiser.slots)]

    def step(self, number: int, gradient: Tensor) -> None:
        """Take step `number`, counted from 0, with one gradient for each of the first rows."""
        rows = slice(0, len(gradient))
        if self._pull is not None:
            gradient = gradient + self._pull(self.theta[rows], self.first[rows])
        self.optimiser.step(self.theta[rows], gradient, [b[rows] for b in self._buffers], number)
