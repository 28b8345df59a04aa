"""Optimisers on stacked flat parameters: row i is client i's model, each row independent of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modicum.errors import UserError


class Optimiser(Protocol):
    """`slots` buffers of the parameters' shape; `step` changes `theta` and the buffers in place."""

    @property
    def slots(self) -> int:
        """How many buffers of a model's size it keeps for each client."""

    def step(self, theta: Tensor, gradient: Tensor, buffers: list[Tensor], step: int) -> None:
        """Take step `step`, counted from 0, in place: one row a client in `theta`, `gradient` and each buffer."""

    def gains(self, steps: int) -> tuple[float, float]:
        """How a constant gradient g and noise of variance v in every step reach the update: (|Δ|/|g|, Var Δ/v)."""

    def farthest(self, steps: int, clipped: float, noise: float, dimension: int) -> float:
        """The largest norm of the update of `dimension` parameters.

        Each step's gradient is a part of norm at most `clipped` plus Gaussian noise; `noise` is that noise's std
        times a quantile of the norm of standard normal values.
        """


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{name} must be positive and finite, got {value}")


@dataclass(frozen=True)
class Sgd:
    """Gradient descent, with optional momentum."""

    lr: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _positive("the learning rate", self.lr)
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum must lie in [0, 1), got {self.momentum}")

    @property
    def slots(self) -> int:
        return 1 if self.momentum else 0

    def step(self, theta: Tensor, gradient: Tensor, buffers: list[Tensor], step: int) -> None:
        if self.momentum:
            buffers[0].mul_(self.momentum).add_(gradient)
            gradient = buffers[0]
        theta.add_(gradient, alpha=-self.lr)

    def gains(self, steps: int) -> tuple[float, float]:
        m = self.momentum
        reach = [self.lr * (1 - m ** (steps - s)) / (1 - m) for s in range(steps)]
        return sum(reach), sum(r * r for r in reach)

    def farthest(self, steps: int, clipped: float, noise: float, dimension: int) -> float:
        """The update is linear in the gradients: clipped parts add up by the triangle inequality, and the noise
        of all steps is one Gaussian."""
        gain, spread = self.gains(steps)
        return gain * clipped + math.sqrt(spread) * noise


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015). Its `gains` are those of steps of length lr: an approximation, for weights only."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _positive("the learning rate", self.lr)

    @property
    def slots(self) -> int:
        return 2

    def step(self, theta: Tensor, gradient: Tensor, buffers: list[Tensor], step: int) -> None:
        mean, square = buffers
        mean.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        scale = (1 - self.beta2 ** (step + 1)) ** 0.5 / (1 - self.beta1 ** (step + 1))
        theta.addcdiv_(mean, torch.sqrt(square).add_(self.eps), value=-self.lr * scale)

    def gains(self, steps: int) -> tuple[float, float]:
        return self.lr * steps, self.lr**2 * steps

    def farthest(self, steps: int, clipped: float, noise: float, dimension: int) -> float:
        """Whatever the gradients: |m_t| ≤ (1−β₁)·√(Σ_{k<t} (β₁²/β₂)^k / (1−β₂))·√v_t by Cauchy and Schwarz."""
        shrink, total, root = self.beta1**2 / self.beta2, 0.0, 0.0
        for t in range(1, steps + 1):
            root += shrink ** (t - 1)
            bias = math.sqrt(1 - self.beta2**t) / (1 - self.beta1**t)
            total += bias * (1 - self.beta1) * math.sqrt(root / (1 - self.beta2))
        return self.lr * total * math.sqrt(dimension)
