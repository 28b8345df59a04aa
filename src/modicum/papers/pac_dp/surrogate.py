"""J(C; ε) = ‖bias of clipping‖² + ‖noise‖²: why a bound is right, from public gradients.

PAC-DP writes J = h(C) + κ(zC/B)² with h and κ unknown. Both are known where public records are: h is the squared
norm of what clipping takes from the mean public gradient, and κ = d/M, the noise's dimensions over the clients who
share it. Relative to ‖mean gradient‖² it is the inverse of a signal-to-noise ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.errors import UserError


@dataclass(frozen=True)
class Surrogate:
    """J for each bound, and its two halves. All are relative to the squared norm of the clipped mean gradient."""

    bounds: tuple[float, ...]
    bias: tuple[float, ...]
    noise: tuple[float, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """J at each bound: bias plus noise."""
        return tuple(b + n for b, n in zip(self.bias, self.noise, strict=True))

    @property
    def best(self) -> float:
        """The bound with the smallest J."""
        return self.bounds[min(range(len(self.bounds)), key=lambda i: self.values[i])]


def surrogate(
    gradients: Tensor, bounds: Sequence[float], multiplier: float, records: float, clients: int
) -> Surrogate:
    """From per-example public gradients (one a row), for clients of `records` whole-batch records each.

    Clipping shrinks the mean gradient as well as turning it, and a learning rate undoes the shrinking. So the bias
    is what remains after the best rescaling: 1/cos² − 1 for the angle between clipped and true mean.
    """
    if gradients.ndim != 2 or not len(gradients):
        raise UserError("the surrogate needs per-example gradients, one a row")
    if not bounds or any(not 0 < c < math.inf for c in bounds) or multiplier < 0 or records <= 0 or clients < 1:
        raise UserError("the surrogate needs positive bounds, records and clients, and noise of at least 0")
    g = gradients.double()
    mean, norms = g.mean(0), g.norm(dim=1)
    bias, noise = [], []
    for c in bounds:
        clipped = (g * torch.clamp(c / norms.clamp_min(1e-30), max=1.0)[:, None]).mean(0)
        signal = clipped.square().sum().item()
        along = (clipped @ mean).item()
        cos2 = along**2 / max(signal * mean.square().sum().item(), 1e-300) if along > 0 else 0.0
        bias.append(1 / max(cos2, 1e-12) - 1)
        noise.append(g.shape[1] * (multiplier * c / records) ** 2 / clients / max(signal, 1e-300))
    return Surrogate(tuple(bounds), tuple(bias), tuple(noise))
