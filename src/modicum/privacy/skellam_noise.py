"""Skellam noise from cryptographic bits: integers, so that no low bits of floats can betray anything.

A table of P(|X| ≤ x) as 128-bit fractions, computed in whole numbers; a draw compares 64 random bits with it, 64
more in the rare case of a tie, and takes a sign. How far a draw is from Skellam is known and returned as a bound
on the total variation distance:

- Masses come from I_{x−1} = I_{x+1} + (2x/μ)·I_x downwards from x = N (Miller). The sequence that begins with
  (0, 1) differs from I by a multiple of K, which grows with x, so that every mass is off by at most p(N+1).
- Each floor loses less than 1 of at least 2^160·min(1, 2N/μ) > 2^146, and since all coefficients are positive an
  error grows no faster than the values: N·2^−146 relative at most.
- Beyond N is a mass of at most 2·exp(−μ·J(N/μ)), J(u) = u·asinh u − √(1+u²) + 1 (Chernoff); N makes p(N+1) and
  half of this smaller than 2^−127.
- Fractions are floored to 2^−128 each.
Together less than (N + 2)·2^−124: under 2^−100 for every table that is built.

A look into the table takes longer or shorter with the draw (caches, ties): somebody who measures the client's own
processor is outside the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from modicum.errors import UserError
from modicum.privacy.accounting.checks import positive, probability, steps

Bits = Callable[[int], bytes]
"""n random bytes; `os.urandom` wherever noise protects somebody."""

LARGEST_VARIANCE = float(1 << 36)  # a client's share: the table is 13.4 standard deviations long
_TAIL = 127 * math.log(2)
_CHUNK = 1 << 16  # draws at a time: temporaries stay in the processor's cache


@dataclass(frozen=True, eq=False)
class SkellamTable:
    """Draws of Skellam(variance). `distance` bounds one draw's total variation distance from it."""

    variance: float
    distance: float
    high: NDArray[np.uint64]
    low: NDArray[np.uint64]

    def draw(self, size: int, bits: Bits = os.urandom) -> NDArray[np.int64]:
        """`size` independent draws; the sign takes a bit of its own, magnitudes 64 bits and, rarely, more."""
        out = np.empty(size, dtype=np.int64)
        for start in range(0, size, _CHUNK):
            part = out[start : start + _CHUNK]
            part[:] = self._magnitudes(np.frombuffer(bits(8 * len(part)), dtype="<u8"), bits)
            coins = np.frombuffer(bits((len(part) + 7) // 8), dtype=np.uint8)
            minus = np.unpackbits(coins, count=len(part)).view(np.bool_)
            np.negative(part, out=part, where=minus)
        return out

    def _magnitudes(self, words: NDArray[np.uint64], bits: Bits) -> NDArray[np.int64]:
        """How many entries are at most a 128-bit uniform number, whose lower half is drawn where it matters."""
        found = np.searchsorted(self.high, words, side="right")
        ties = np.flatnonzero((found > 0) & (self.high[found - 1] == words))
        for i in ties:
            first = int(np.searchsorted(self.high, words[i], side="left"))
            lower = np.frombuffer(bits(8), dtype="<u8")[0]
            found[i] = first + int(np.searchsorted(self.low[first : found[i]], lower, side="right"))
        return found


def delta_charge(distance: float, dimension: int, samplers: int, releases: int, epsilon: float) -> float:
    """What inexact draws add to δ: (1 + e^ε) times the distance of all draws together (R12)."""
    if not (0 <= distance < 1 and epsilon >= 0):
        raise UserError(f"a charge needs a distance under 1 and ε of at least 0, got {distance} and {epsilon}")
    total = distance * steps(dimension) * steps(samplers) * steps(releases)
    growth = math.exp(epsilon) if epsilon < 700 else math.inf  # and beyond nothing is promised anyway
    return probability("the charge to δ", (1 + growth) * total)


def chernoff(variance: float, x: float) -> float:
    """ln of a bound on P(X ≥ x) for Skellam(variance) and x ≥ 0."""
    u = x / variance
    # u·asinh u − √(1+u²) + 1, with √(1+u²) − 1 = u²/(1 + √(1+u²)) so that small u keep their digits.
    return -variance * (u * math.asinh(u) - u * u / (1 + math.sqrt(1 + u * u)))


@lru_cache(maxsize=16)
def skellam_table(variance: float) -> SkellamTable:
    """The table for one variance (seconds for the largest, then remembered)."""
    if positive("the variance of integer noise", variance) > LARGEST_VARIANCE:
        raise UserError(
            f"a share of integer noise with variance {variance:.3g} needs too long a table (at most "
            f"{LARGEST_VARIANCE:.3g}): choose a coarser lattice"
        )
    last = _last(variance)
    masses = _masses(Fraction(variance), last)
    totals = list(accumulate([masses[0], *(2 * m for m in masses[1:])]))
    whole = totals.pop()
    packed = b"".join(((value << 128) // whole).to_bytes(16, "little") for value in totals)
    words = np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
    high, low = np.ascontiguousarray(words[:, 1]), np.ascontiguousarray(words[:, 0])
    return SkellamTable(float(variance), distance(variance), high, low)


def distance(variance: float) -> float:
    """A bound on the total variation distance of one draw from Skellam(variance); see above."""
    return (_last(variance) + 2) * 2.0**-124


def _last(variance: float) -> int:
    """The smallest N with P(X ≥ N) under 2^−127."""
    low, high = 0, 256 + math.ceil(32 * math.sqrt(variance))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chernoff(variance, middle) < -_TAIL else (middle, high)
    return high


def _masses(variance: Fraction, last: int) -> list[int]:
    """Whole numbers in proportion to I_0(μ), …, I_last(μ)."""
    twice, divisor = 2 * variance.denominator, variance.numerator
    above, here = 0, 1 << 160
    values = [here]
    for x in range(last, 0, -1):
        above, here = here, above + twice * x * here // divisor
        values.append(here)
    values.reverse()
    return values
