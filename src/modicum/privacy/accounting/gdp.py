"""Gaussian differential privacy: the exact closed form for unsampled Gaussian releases.

GDP(μ) is the trade-off of N(0,1) against N(μ,1). A Gaussian release whose noise is z times its sensitivity is
GDP(1/z), and releases compose exactly to μ = √Σ z_t⁻² (Dong, Roth & Su 2022). The price in (ε, δ) is
δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) (Balle & Wang 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr

from modicum.errors import UserError
from modicum.privacy.checks import positive, probability

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_ROUNDING = 1e-12  # relative room for the root finder, always given to the safe side


def compose(multipliers: Iterable[float]) -> float:
    """μ of Gaussian releases with these noise multipliers (noise-std over sensitivity)."""
    return math.sqrt(math.fsum(z**-2 for z in multipliers))


def _mills(t: float) -> float:
    """(1 − Φ(t)) / φ(t)."""
    return math.sqrt(math.pi / 2) * float(erfcx(t / math.sqrt(2)))


def log_delta(epsilon: float, mu: float) -> float:
    """ln δ(ε) of GDP(μ), without cancellation for small μ or tiny δ.

    e^ε φ(t+μ) = φ(t) for t = ε/μ − μ/2, so δ = φ(t)·(R(t) − R(t+μ)) with R the Mills ratio; for small μ the
    difference is the integral of −R′(s) = 1 − s·R(s).
    """
    t = epsilon / mu - mu / 2
    if t < -30:  # Φ(−t) is 1 to within 1e-197
        upper = math.exp(-t * t / 2) * _mills(t + mu) / math.sqrt(2 * math.pi)
        return math.log1p(-upper)
    if mu < 0.5 and t < 100:
        s = t + mu * (1 + _NODES) / 2
        slopes = 1 - s * math.sqrt(math.pi / 2) * erfcx(s / math.sqrt(2))
        gap = float(mu / 2 * np.dot(_WEIGHTS, slopes))
        return -t * t / 2 - math.log(2 * math.pi) / 2 + math.log(gap)
    first, second = float(log_ndtr(-t)), epsilon + float(log_ndtr(-t - mu))
    return first + math.log(-math.expm1(min(second - first, -1e-300)))


def delta(epsilon: float, mu: float) -> float:
    """δ(ε) of GDP(μ)."""
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise UserError(f"epsilon must be at least 0 and finite, got {epsilon}")
    return math.exp(log_delta(epsilon, positive("mu", mu)))


def epsilon_from_mu(mu: float, delta: float) -> float:
    """The smallest ε with δ(ε) ≤ delta for GDP(μ), rounded up."""
    probability("delta", delta)
    if mu == 0:
        return 0.0
    positive("mu", mu)
    target = math.log(delta)
    if log_delta(0.0, mu) <= target:
        return 0.0
    # δ(ε) ≤ Φ(μ/2 − ε/μ) ≤ exp(−(ε/μ − μ/2)²/2), so this bracket always holds the root.
    high = mu * mu / 2 + mu * math.sqrt(-2 * target)
    root = float(brentq(lambda e: log_delta(e, mu) - target, 0.0, high, xtol=1e-300, rtol=1e-14, maxiter=500))
    return root * (1 + _ROUNDING)


def mu_from_epsilon(epsilon: float, delta: float) -> float:
    """The largest μ for which GDP(μ) is (ε, δ)-private, rounded down: what a budget (ε, δ) buys."""
    positive("epsilon", epsilon)
    target = math.log(probability("delta", delta))
    low = high = math.sqrt(2 * epsilon)  # ε = μ²/2 puts δ near one half
    while log_delta(epsilon, low) > target:
        low /= 2
    while log_delta(epsilon, high) < target:
        high *= 2
    root = float(brentq(lambda m: log_delta(epsilon, m) - target, low, high, xtol=1e-300, rtol=1e-14, maxiter=500))
    return root * (1 - _ROUNDING)
