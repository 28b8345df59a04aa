"""What a clipping bound and a noise multiplier are worth, from public gradients: FedMAP's Eq. (18), made exact.

For one round of DP-SGD with n = ‖g‖, m = E g, c_C = E clip(g, C) and s(C) = E min(n, C)², M clients with batches B
at rate q and noise z·Δ·C (Δ: joint sensitivity with the paid signals):

    V(C, z) = ((1 − q)·s/B + d·(zΔC/B)²)/M        variance of the mean released gradient
    J(C, z) = ‖c_C − m‖² + V                       its mean squared error, for a fixed step size
    U(C, z) = ⟨m, c_C⟩² / (‖m‖²·(‖c_C‖² + V))      progress where the step size is tuned to C and z, from 0 to 1

All are differentiable in C and z. A `Trace` keeps what they need of public gradients: norms, parts along m, and a
random projection of the rest, so that it stays small whatever the model. Traces may be stacked (runs, rounds, …).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.errors import UserError

SIDES = 64  # dimensions that the part of a gradient beside the mean is projected to


@dataclass(frozen=True)
class Trace:
    """Gradients of n public records at one model of a run, or at many: all but the last axes of each field."""

    norms: Tensor  # ‖g_k‖: (…, n)
    along: Tensor  # ⟨g_k, m⟩/‖m‖: (…, n)
    sides: Tensor  # the rest of g_k, projected so that lengths stay the same in the mean: (…, n, SIDES)
    mean: Tensor  # ‖m‖: (…)

    @classmethod
    def of(cls, gradients: Tensor, seed: int = 0, sides: int = SIDES) -> Trace:
        """From per-example gradients, one a row."""
        if gradients.ndim != 2 or len(gradients) < 2:
            raise UserError("a trace needs the gradients of at least two public records, one a row")
        g = gradients.detach()
        m = g.mean(0)
        size = m.norm().clamp_min(1e-30)
        along = g @ (m / size)
        rest = g - along[:, None] * (m / size)
        if g.shape[1] > sides:  # a sign for each parameter and one of few sums: cheap whatever the dimension
            generator = torch.Generator().manual_seed(seed)
            where = torch.randint(sides, (g.shape[1],), generator=generator).to(g.device)
            signs = (torch.randint(2, (g.shape[1],), generator=generator) * 2 - 1).to(g)
            rest = g.new_zeros(len(g), sides).index_add_(1, where, rest * signs)
        return cls(*(part.double().cpu() for part in (g.norm(dim=1), along, rest, size)))

    @classmethod
    def stacked(cls, traces: Sequence[Trace]) -> Trace:
        """Many as one, on a new first axis."""
        parts = zip(*((t.norms, t.along, t.sides, t.mean) for t in traces), strict=True)
        return cls(*(torch.stack(part) for part in parts))

    def at(self, index: tuple[int | slice, ...]) -> Trace:
        """Some of those that are stacked."""
        return Trace(self.norms[index], self.along[index], self.sides[index], self.mean[index])


@dataclass(frozen=True)
class Round:
    """What else decides a round's noise."""

    batch: float  # B, expected
    rate: float  # q; 1: whole batches
    dimension: int
    shared: float  # M: clients (and local steps) over which noise is averaged
    sensitivity: float = 1.0  # Δ

    def noise(self, bound: Tensor, multiplier: Tensor) -> Tensor:
        """d·(zΔC/B)²/M."""
        return self.dimension * (multiplier * self.sensitivity * bound / self.batch) ** 2 / self.shared


def joint_sensitivity(*ratios: float) -> float:
    """Δ in units of C, of a gradient released with signals that get `ratio` times the query's multiplier each."""
    return 1 / math.sqrt(1 - math.fsum(r**-2 for r in ratios))


def clipped(trace: Trace, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(⟨c_C, m⟩/‖m‖, ‖c_C‖² beside m, s(C)); the middle one without the bias of a finite sample."""
    factor = torch.clamp(bound[..., None] / trace.norms.clamp_min(1e-30), max=1.0)
    along = (factor * trace.along).mean(-1)
    rows, n = factor[..., None] * trace.sides, trace.norms.shape[-1]
    beside = (rows.sum(-2).square().sum(-1) - rows.square().sum((-1, -2))) / (n * (n - 1))
    return along, beside.clamp_min(0.0), torch.minimum(trace.norms, bound[..., None]).square().mean(-1)


def variance(trace: Trace, bound: Tensor, multiplier: Tensor, round: Round) -> Tensor:
    """V."""
    return _sampling(clipped(trace, bound)[2], round) + round.noise(bound, multiplier)


def error(trace: Trace, bound: Tensor, multiplier: Tensor, round: Round) -> Tensor:
    """J."""
    along, beside, square = clipped(trace, bound)
    return (along - trace.mean) ** 2 + beside + _sampling(square, round) + round.noise(bound, multiplier)


def utility(trace: Trace, bound: Tensor, multipliers: Tensor, round: Round) -> Tensor:
    """U for each of several multipliers, on a new last axis."""
    along, beside, square = clipped(trace, bound)
    rest = (beside + _sampling(square, round))[..., None] + round.noise(bound[..., None], multipliers)
    progress = along.clamp_min(0.0).square()[..., None]
    return progress / (progress + rest).clamp_min(1e-300)


def _sampling(square: Tensor, round: Round) -> Tensor:
    return (1 - round.rate) * square / round.batch / round.shared


def signals(trace: Trace, bound: Tensor) -> tuple[Tensor, Tensor]:
    """What the paid signals say without noise: P(n ≤ C), and E min(n, C)²/C²."""
    share = (trace.norms <= bound[..., None]).double().mean(-1)
    return share, (torch.minimum(trace.norms, bound[..., None]) / bound[..., None]).square().mean(-1)
