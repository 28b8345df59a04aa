"""Skellam noise from cryptographic bits: integers, so that no low bits of floats can betray anything.

A table of P(|X| ≤ x) as 128-bit fractions, computed in whole numbers; a draw compares 64 random bits with it, 64
more in the rare case of a tie, and takes a sign. How far a draw is from Skellam, in total variation, is known: see
`accounting.skellam_tables`.

A look into the table takes longer or shorter with the draw (caches, ties): somebody who measures the client's own
processor is outside the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from modicum.errors import UserError
from modicum.privacy.accounting.skellam_tables import distance, last_entry
from modicum.privacy.checks import positive

Bits = Callable[[int], bytes]
"""n random bytes; `os.urandom` wherever noise protects somebody."""

LARGEST_VARIANCE = float(1 << 36)  # a client's share: the table is 13.4 standard deviations long
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


@lru_cache(maxsize=16)
def skellam_table(variance: float) -> SkellamTable:
    """The table for one variance (seconds for the largest, then remembered)."""
    if positive("the variance of integer noise", variance) > LARGEST_VARIANCE:
        raise UserError(
            f"a share of integer noise with variance {variance:.3g} needs too long a table (at most "
            f"{LARGEST_VARIANCE:.3g}): choose a coarser lattice"
        )
    last = last_entry(variance)
    masses = _masses(Fraction(variance), last)
    totals = list(accumulate([masses[0], *(2 * m for m in masses[1:])]))
    whole = totals.pop()
    packed = b"".join(((value << 128) // whole).to_bytes(16, "little") for value in totals)
    words = np.frombuffer(packed, dtype="<u8").reshape(-1, 2)
    high, low = np.ascontiguousarray(words[:, 1]), np.ascontiguousarray(words[:, 0])
    return SkellamTable(float(variance), distance(variance), high, low)


def _masses(variance: Fraction, last: int) -> list[int]:
    """Whole numbers in proportion to I_0(μ), …, Ilast_entry(μ)."""
    twice, divisor = 2 * variance.denominator, variance.numerator
    above, here = 0, 1 << 160
    values = [here]
    for x in range(last, 0, -1):
        above, here = here, above + twice * x * here // divisor
        values.append(here)
    values.reverse()
    return values
