"""How far draws from a table of Skellam's distribution are from Skellam, and what that adds to δ (R12).

The table (`noise.skellam`) ends at N; each of its entries is computed in whole numbers:

- Masses come from I_{x−1} = I_{x+1} + (2x/μ)·I_x downwards from x = N (Miller). The sequence that begins with
  (0, 1) differs from I by a multiple of K, which grows with x, so that every mass is off by at most p(N+1).
- Each floor loses less than 1 of at least 2^160·min(1, 2N/μ) > 2^146, and since all coefficients are positive an
  error grows no faster than the values: N·2^−146 relative at most.
- Beyond N is a mass of at most 2·exp(−μ·J(N/μ)), J(u) = u·asinh u − √(1+u²) + 1 (Chernoff); N makes p(N+1) and
  half of this smaller than 2^−127.
- Fractions are floored to 2^−128 each.
Together less than (N + 2)·2^−124: under 2^−100 for every table that is built.
"""

from __future__ import annotations

import math

from modicum.errors import UserError
from modicum.privacy.checks import probability, steps

_TAIL = 127 * math.log(2)


def distance(variance: float) -> float:
    """A bound on the total variation distance of one draw from Skellam(variance); see above."""
    return (last_entry(variance) + 2) * 2.0**-124


def last_entry(variance: float) -> int:
    """The smallest N with P(X ≥ N) under 2^−127."""
    low, high = 0, 256 + math.ceil(32 * math.sqrt(variance))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chernoff(variance, middle) < -_TAIL else (middle, high)
    return high


def chernoff(variance: float, x: float) -> float:
    """ln of a bound on P(X ≥ x) for Skellam(variance) and x ≥ 0."""
    u = x / variance
    # u·asinh u − √(1+u²) + 1, with √(1+u²) − 1 = u²/(1 + √(1+u²)) so that small u keep their digits.
    return -variance * (u * math.asinh(u) - u * u / (1 + math.sqrt(1 + u * u)))


def delta_charge(distance: float, dimension: int, samplers: int, releases: int, epsilon: float) -> float:
    """What inexact draws add to δ: (1 + e^ε) times the distance of all draws together (R12)."""
    if not (0 <= distance < 1 and epsilon >= 0):
        raise UserError(f"a charge needs a distance under 1 and ε of at least 0, got {distance} and {epsilon}")
    total = distance * steps(dimension) * steps(samplers) * steps(releases)
    growth = math.exp(epsilon) if epsilon < 700 else math.inf  # and beyond nothing is promised anyway
    return probability("the charge to δ", (1 + growth) * total)
