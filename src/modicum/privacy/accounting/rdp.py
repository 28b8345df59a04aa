"""Rényi differential privacy of (Poisson-sampled) Gaussians, and the one-order cap that a filter needs.

Sampled Gaussian, order α: (α−1)·ρ = ln E_{x~N(0,z²)} [(1 − q + q·e^{(2x−1)/(2z²)})^α], the larger of the two
directions (Mironov, Talwar & Zhang 2019). Whole orders use the binomial sum; other orders the trapezoid rule,
which converges exponentially fast on this integrand. ρ holds under zero-out and add-remove; for replace-one
pass z/2 (R6: looser than the mixture pair, but sound).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from modicum.errors import UserError
from modicum.privacy.checks import positive, probability, rate, steps

FloatArray = NDArray[np.float64]

_ROUNDING = 1e-8  # relative; the quadrature agrees with 40-digit arithmetic to 2e-9 or better
_LARGEST = 1 << 21  # order: a sum over a whole one has as many terms, and a forger writes any number
_POINTS = 1e6  # of a quadrature: where it needs more, so much is lost that sampling hardly helps

ORDERS: tuple[float, ...] = (
    *(round(1 + k / 50, 2) for k in range(1, 50)),
    *(round(2 + k / 10, 1) for k in range(100)),
    *range(12, 64),
    *(float(round(64 * 2 ** (k / 4))) for k in range(60)),
)


def _order(alpha: float) -> float:
    if not 1 < alpha <= _LARGEST:
        raise UserError(f"a Rényi order must be finite and above 1, at most {_LARGEST:,}, got {alpha}")
    return float(alpha)


def rdp_gaussian(z: float, alpha: float) -> float:
    """ρ(α) = α / (2z²) of one unsampled Gaussian."""
    return _order(alpha) / (2 * positive("the noise multiplier", z) ** 2)


@lru_cache(maxsize=1 << 16)
def rdp_sampled_gaussian(q: float, z: float, alpha: float) -> float:
    """ρ(α) of one Poisson-sampled Gaussian with rate q and noise multiplier z."""
    rate(q), positive("the noise multiplier", z)
    alpha = _order(alpha)
    if q == 1:
        return rdp_gaussian(z, alpha)
    if alpha == int(alpha) and alpha <= 1024:
        return float(_whole_order(np.array([q]), np.array([z]), int(alpha))[0])
    return _any_order(q, z, alpha) * (1 + _ROUNDING)


def _whole_order(q: FloatArray, z: FloatArray, alpha: int) -> FloatArray:
    """ρ from E − 1 = Σ_{k≥2} C(α,k) q^k (1−q)^{α−k} (e^{k(k−1)/(2z²)} − 1): no cancellation."""
    log_q, log_p, half = np.log(q), np.log1p(-q), 1 / (2 * z**2)
    total = np.full(q.shape, -np.inf)
    for k in range(2, alpha + 1):
        binomial = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
        exponent = k * (k - 1) * half
        with np.errstate(divide="ignore"):
            log_expm1 = np.where(exponent > 30, exponent, np.log(np.expm1(np.minimum(exponent, 30.5))))
        total = np.logaddexp(total, binomial + k * log_q + (alpha - k) * log_p + log_expm1)
    return np.asarray(np.logaddexp(0, total) / (alpha - 1))


def _any_order(q: float, z: float, alpha: float) -> float:
    # The integrand lives between its two humps near 0 and α; its nearest branch point is πz² off the real line.
    step = min(z / 5, z * z / 4)
    if not (alpha + 26 * z) < _POINTS * step:
        return rdp_gaussian(z, alpha)  # an upper bound, too high by less than ln(1/q)·α/(α−1)
    x = np.arange(-13 * z, alpha + 13 * z + step, step)
    log_ratio = (2 * x - 1) / (2 * z * z)
    log_mix = np.logaddexp(math.log1p(-q), math.log(q) + log_ratio)
    log_weight = -(x**2) / (2 * z * z) + math.log(step / (z * math.sqrt(2 * math.pi)))
    top = float(np.max(alpha * log_mix + log_weight))
    if alpha * float(log_mix[-1]) < 300 and float(log_ratio[-1]) < 300:
        # E[r] = 1 for r = 1 + q(e^ℓ − 1), so E[r^α] − 1 = E[r^α − 1 − α(r − 1)]: keeps the digits of a tiny ρ.
        growth = q * np.expm1(log_ratio)
        excess = np.expm1(alpha * np.log1p(growth)) - alpha * growth
        return max(0.0, math.log1p(float(np.dot(excess, np.exp(log_weight)))) / (alpha - 1))
    log_moment = top + math.log(float(np.sum(np.exp(alpha * log_mix + log_weight - top))))
    return max(0.0, log_moment / (alpha - 1))


def epsilon_from_rdp(rho: float, alpha: float, delta: float) -> float:
    """ε = ρ + ln(1−1/α) − (ln δ + ln α)/(α−1) (Canonne, Kamath & Steinke 2020, Prop. 12), at least 0."""
    _order(alpha), probability("delta", delta)
    return max(0.0, rho + math.log1p(-1 / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1))


def filter_cap(epsilon: float, delta: float, alpha: float) -> float:
    """The Rényi budget at one order α fixed beforehand: spending at most this is (ε, δ)-private (R2)."""
    positive("epsilon", epsilon), probability("delta", delta)
    alpha = _order(alpha)
    cap = epsilon - math.log1p(-1 / alpha) + (math.log(delta) + math.log(alpha)) / (alpha - 1)
    if cap <= 0:
        raise UserError(
            f"order α={alpha:g} leaves nothing of the budget ε={epsilon:g} at δ={delta:g}: choose a larger order"
        )
    return cap


def best_order(q: float, z: float, count: int, delta: float, orders: Sequence[float] = ORDERS) -> float:
    """The order at which `count` planned steps convert to the smallest ε: a filter's α*, fixed beforehand."""
    return float(_best(q, z, steps(count), probability("delta", delta), tuple(orders))[1])


def epsilon(q: float, z: float, count: int, delta: float, orders: Sequence[float] = ORDERS) -> float:
    """ε of `count` steps, best over `orders` (all of them hold at once, since nothing adapts)."""
    return _best(q, z, steps(count), probability("delta", delta), tuple(orders))[0]


def _best(q: float, z: float, count: int, delta: float, orders: tuple[float, ...]) -> tuple[float, float]:
    """(ε, order), by descent from a coarse look: ε(α) has one valley."""

    def at(i: int) -> float:
        return epsilon_from_rdp(count * rdp_sampled_gaussian(q, z, orders[i]), orders[i], delta)

    values = {i: at(i) for i in range(0, len(orders), 16)}
    best = min(values, key=lambda i: values[i])
    for i in range(max(0, best - 15), min(len(orders), best + 16)):
        values.setdefault(i, at(i))
    best = min(values, key=lambda i: values[i])
    return values[best], orders[best]
