"""What the draws of a cell come to: means, paired differences with intervals, ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import t as student

from modicum_bench.leaderboard.grid import ROWS, Cell
from modicum_bench.leaderboard.play import NO_PRIVACY

PUBLIC_ALONE = "public alone"
LOSS = 1.0  # points that the default method may lose at most
Values = Mapping[int, float]  # seed → percent


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences in points, and half of its 95% interval by Student's t (NaN for one pair)."""

    mean: float
    half: float

    @property
    def text(self) -> str:
        return f"{self.mean:+.1f}" + ("" if math.isnan(self.half) else f" ± {self.half:.1f}")

    @property
    def tied(self) -> bool:
        """Whether nothing below zero is all that the interval holds."""
        return self.mean >= 0 or self.mean + self.half >= 0

    @property
    def sound(self) -> bool:
        """Whether the interval excludes a loss of more than a point."""
        return self.mean - self.half >= -LOSS


@dataclass(frozen=True)
class Played:
    """One cell: each method's accuracy by seed."""

    cell: Cell
    values: Mapping[str, Values]

    @property
    def order(self) -> list[str]:
        """Methods from best to worst by their mean over the seeds that all of them have."""
        return sorted(self._methods, key=lambda name: -self.mean(name))

    @property
    def _methods(self) -> list[str]:
        return [name for name in ROWS if self.values.get(name)]

    @property
    def whole(self) -> bool:
        """Whether at least two methods can be compared by at least two common draws."""
        return len(self._methods) > 1 and len(self.common) > 1

    @property
    def common(self) -> set[int]:
        return set.intersection(*(set(self.values[name]) for name in self._methods)) if self._methods else set()

    def mean(self, name: str) -> float:
        own = self.values[name]
        return statistics.fmean(own[s] for s in (self.common or own))

    @property
    def rival(self) -> str | None:
        """The best of the other methods, which is found on the same draws: a judge that is hard on `auto`."""
        return next((name for name in self.order if name != "auto"), None)

    def minus(self, one: str, other: str) -> Difference | None:
        """Paired by seed."""
        a, b = self.values.get(one, {}), self.values.get(other, {})
        return difference([a[s] - b[s] for s in a if s in b])

    def gap(self, one: str) -> float | None:
        """Share of the way from public records to no privacy."""
        limit, public = self.values.get(NO_PRIVACY), self.values.get(PUBLIC_ALONE)
        own = self.values.get(one)
        if not (limit and public and own) or _mean(limit) <= _mean(public):
            return None
        return (_mean(own) - _mean(public)) / (_mean(limit) - _mean(public))


def difference(pairs: Sequence[float]) -> Difference | None:
    if not pairs:
        return None
    if len(pairs) < 2:
        return Difference(pairs[0], math.nan)
    half = float(student.ppf(0.975, len(pairs) - 1)) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return Difference(statistics.fmean(pairs), half)


def gathered(results: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> list[Played]:
    """Cells with any result, in their order."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for r in results:
        values = found.setdefault(r["cell"], {})
        if "accuracy" in r:
            values.setdefault(r["method"], {})[r["seed"]] = 100 * r["accuracy"]
        if r.get("public_only") is not None:
            values.setdefault(PUBLIC_ALONE, {})[r["seed"]] = 100 * r["public_only"]
    return [Played(cell, found[cell.name]) for cell in cells if cell.name in found]


def spread(values: Values) -> str:
    """Mean ± standard deviation of single draws."""
    if not values:
        return "–"
    more = f" ± {statistics.stdev(values.values()):.1f}" if len(values) > 1 else ""
    return f"{_mean(values):.1f}{more}"


def _mean(values: Values) -> float:
    return statistics.fmean(values.values())
