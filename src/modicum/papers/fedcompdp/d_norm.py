"""The constrained D-norm set of client weights (Jiao, Yang & Song 2022), and the projection onto it.

P = {p ≥ 0, |p_k − q_k| ≤ p̃_k, Σ |p_k − q_k|/p̃_k ≤ Γ, Σ p_k = 1}: weights that stray from q by at most p̃_k each,
and by at most Γ of those distances together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
HALVINGS = 80  # bisections of λ: the last digit


def project(a: Sequence[float], q: Sequence[float], reach: Sequence[float], gamma: float) -> Floats:
    """The point of P nearest to a. `q` adds up to 1; `reach` holds p̃.

    u = p − q minimises ‖u − v‖², v = a − q. With multipliers μ of Σu = 0 and λ of the D-norm,
    u_k = clip(soft(v_k − μ, λ/p̃_k), max(−p̃_k, −q_k), p̃_k). Σu falls in μ, Σ|u|/p̃ falls in λ.
    """
    q_, reach_ = np.asarray(q, np.float64), np.asarray(reach, np.float64)
    v = np.asarray(a, np.float64) - q_
    low, high = np.maximum(-reach_, -q_), reach_
    if gamma <= 0 or not (reach_ > 0).any():
        return q_.copy()
    over = np.where(reach_ > 0, 1 / np.where(reach_ > 0, reach_, 1.0), 0.0)

    def balanced(lam: float) -> Floats:
        return _balanced(v, lam * over, low, high)

    u = balanced(0.0)
    if (np.abs(u) * over).sum() <= gamma:
        return q_ + u
    small, large = 0.0, float(np.abs(v).max() * 2 / over[over > 0].min() + 1e-300)
    for _ in range(HALVINGS):
        middle = (small + large) / 2
        if (np.abs(balanced(middle)) * over).sum() > gamma:
            small = middle
        else:
            large = middle
    return q_ + balanced(large)


def _balanced(v: Floats, width: Floats, low: Floats, high: Floats) -> Floats:
    """u of the multiplier μ that makes Σu = 0: Σu falls in μ, in straight lines between known corners."""
    corners = np.sort(np.concatenate([v - width - high, v - width, v + width, v + width - low]))
    sums = _shrunk(v - corners[:, None], width, low, high).sum(1)
    after = int(np.searchsorted(-sums, 0.0))  # the first corner with Σu ≤ 0
    if after in (0, len(sums)):  # rounding alone: all are at their highest or lowest
        return _shrunk(v - corners[min(after, len(sums) - 1)], width, low, high)
    above, below = sums[after - 1], sums[after]
    mu = corners[after - 1] + (corners[after] - corners[after - 1]) * above / (above - below)
    return _shrunk(v - mu, width, low, high)


def _shrunk(x: Floats, width: Floats, low: Floats, high: Floats) -> Floats:
    soft: Floats = np.sign(x) * np.maximum(np.abs(x) - width, 0.0)
    clipped: Floats = np.clip(soft, low, high)
    return clipped


def d_norm(x: Tensor, largest: int) -> float:
    """The sum of the Γ′ largest |coordinates|."""
    return float(torch.topk(x.abs().double(), min(largest, x.numel())).values.sum())


def d_norm_slope(x: Tensor, largest: int) -> Tensor:
    """A subgradient: the signs of those coordinates, zero elsewhere."""
    rows = torch.topk(x.abs(), min(largest, x.numel())).indices
    slope = torch.zeros_like(x)
    slope[rows] = torch.sign(x[rows])
    return slope
