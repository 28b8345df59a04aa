"""Passes of one shape for records that were drawn in secret, so that no shape tells who was drawn (R16).

If drawing one record more made a batch one row longer, libraries would compute the others in another order, and
whoever chooses the model can magnify the last bits that change. Two constructions keep shapes apart from coins:

- lanes: a pass has c rows and record i's row is i mod c. A step makes as many passes as its fullest lane has drawn
  records. What is computed of a record depends on its values and its lane alone.
- a capacity: one pass of K rows. Drawn records take rows at random, so that the law of the others' rows does not
  depend on one record's coin. Where more than K are drawn a random K are kept, and δ pays for that.

Rows that nobody takes are blanks: zeros at weight 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from modicum.errors import UserError

BLANK = -1  # in place of a record's number: a row that nobody takes

Rows = NDArray[np.int64]
Uniform = Callable[[int], NDArray[np.float64]]
"""So many numbers in [0, 1), drawn in secret like the coins."""


@dataclass(frozen=True)
class Lanes:
    """Passes of `rows` rows; record i stands in row i mod `rows` of one of them."""

    rows: int

    def __post_init__(self) -> None:
        _check(self.rows)

    def laid_out(self, drawn: Rows, records: int, uniform: Uniform) -> Rows:
        """(passes, rows) numbers of records, or `BLANK`; within a lane in the order of their numbers."""
        lanes = drawn % self.rows
        before = np.argsort(lanes, kind="stable")
        counts = np.bincount(lanes, minlength=self.rows)
        turn = np.empty(len(drawn), np.int64)
        turn[before] = np.arange(len(drawn)) - np.repeat(np.cumsum(counts) - counts, counts)
        out = np.full((counts.max(initial=0), self.rows), BLANK)
        out[turn, lanes] = drawn
        return out

    def overflow(self, rate: float) -> float:
        """Nothing is ever left out."""
        return 0.0

    def expected_passes(self, records: int, rate: float) -> float:
        """Of a step: the fullest of independent binomials, E[max] = Σ_t P(max > t)."""
        long, short = records % self.rows, self.rows - records % self.rows
        size = records // self.rows
        t = np.arange(size + 1)
        below = binom.cdf(t, size, rate) ** short * binom.cdf(t, size + 1, rate) ** long
        return float(np.sum(1 - below))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"kind": "lanes", "rows": self.rows}

    def sentence(self) -> str:
        """For a certificate's reader."""
        return f"in passes of {self.rows} rows, each record always in the same row"


@dataclass(frozen=True)
class Capacity:
    """One pass of `rows` rows, for a client of so many `records`."""

    rows: int
    records: int

    def __post_init__(self) -> None:
        _check(self.rows)
        _check(self.records)

    def laid_out(self, drawn: Rows, records: int, uniform: Uniform) -> Rows:
        """(1, rows) numbers of records, or `BLANK`: an injection drawn uniformly, of a random few if need be."""
        if records != self.records:
            raise UserError(f"the capacity was planned for {self.records} records, and there are {records}")
        # Two numbers each, so that ties, which would favour some rows, are out of the question.
        first, second = uniform(2 * (self.rows + records)).reshape(2, -1)
        order = np.lexsort((second, first))
        rows, ranks = order[order < self.rows], np.argsort(order)
        kept = drawn[np.argsort(ranks[self.rows + drawn])][: self.rows]
        out = np.full((1, self.rows), BLANK)
        out[0, rows[: len(kept)]] = kept
        return out

    def overflow(self, rate: float) -> float:
        """P[Bin(n − 1, q) ≥ K]: only then can one record's coin change who else is kept."""
        return float(binom.sf(self.rows - 1, self.records - 1, rate))

    def expected_passes(self, records: int, rate: float) -> float:
        """Always the one."""
        return 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"kind": "capacity", "rows": self.rows, "records": self.records}

    def sentence(self) -> str:
        """For a certificate's reader."""
        return f"in one pass of {self.rows} rows, which drawn records take at random"


FixedShape = Lanes | Capacity


def shape_from_dict(d: dict[str, Any]) -> FixedShape:
    """Back from a shape's `to_dict`; an unknown kind is refused."""
    match d:
        case {"kind": "lanes", "rows": int(rows)}:
            return Lanes(rows)
        case {"kind": "capacity", "rows": int(rows), "records": int(records)}:
            return Capacity(rows, records)
    raise UserError(f"unknown shape of passes {d!r}")


@lru_cache(maxsize=4096)
def smallest_capacity(records: int, rate: float, failure: float) -> Capacity:
    """The fewest rows that overflow with probability at most `failure` a step; all records never do."""
    tail = binom.sf(np.arange(records), records - 1, rate)  # of rows 1, 2, …
    return Capacity(1 + int(np.argmax(tail <= failure)), records)


def _check(count: int) -> None:
    if isinstance(count, bool) or count < 1:
        raise UserError(f"passes have at least 1 row, and are for at least 1 record, got {count}")
