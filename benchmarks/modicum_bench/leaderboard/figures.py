"""What the draws of a cell come to: means, paired differences with intervals, ranks."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import t as student

from modicum_bench.leaderboard.grid import JUDGED, PATIENTS, ROWS, Cell
from modicum_bench.leaderboard.play import NO_PRIVACY, PUBLIC_ALONE

LOSS = 1.0  # points that the default method may lose at most
Values = Mapping[int, float]  # seed → percent
Wrong = Mapping[int, frozenset[int]]  # seed → patients that were judged wrongly


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
    wrong: Mapping[str, Wrong] = field(default_factory=dict)  # where draws judge different patients

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

    def over_patients(self, one: str, other: str) -> Difference | None:
        """The same difference, were other patients drawn as well; None where draws share their test records."""
        a, b = self.wrong.get(one, {}), self.wrong.get(other, {})
        return crossed([(a[s], b[s]) for s in a if s in b])

    def resampled(self, one: str, other: str) -> Difference | None:
        """The same difference with the variance of draws that share records as Nadeau & Bengio 2003 correct it."""
        a, b = self.values.get(one, {}), self.values.get(other, {})
        return difference([a[s] - b[s] for s in a if s in b], JUDGED / (PATIENTS - JUDGED))

    def gap(self, one: str) -> float | None:
        """Share of the way from public records to no privacy."""
        limit, public = self.values.get(NO_PRIVACY), self.values.get(PUBLIC_ALONE)
        own = self.values.get(one)
        if not (limit and public and own) or _mean(limit) <= _mean(public):
            return None
        return (_mean(own) - _mean(public)) / (_mean(limit) - _mean(public))


def difference(pairs: Sequence[float], shared: float = 0.0) -> Difference | None:
    """Over draws, whose mean has the variance of one times 1/draws + `shared`."""
    if not pairs:
        return None
    if len(pairs) < 2:
        return Difference(pairs[0], math.nan)
    spread = statistics.stdev(pairs) * math.sqrt(1 / len(pairs) + shared)
    return Difference(statistics.fmean(pairs), float(student.ppf(0.975, len(pairs) - 1)) * spread)


def crossed(pairs: Sequence[tuple[frozenset[int], frozenset[int]]]) -> Difference | None:
    """Difference in accuracy over draws that judge JUDGED of PATIENTS each, from what two methods get wrong.

    Both draws and patients are drawn from many: the variance by draws, plus that by patients, less that of single
    judgements, which both hold (Cameron, Gelbach & Miller 2011).
    """
    draws = len(pairs)
    if draws < 2:
        return None
    judgements = draws * JUDGED
    by_draw = [len(b) - len(a) for a, b in pairs]
    by_patient = Counter(p for _, b in pairs for p in b)
    by_patient.subtract(p for a, _ in pairs for p in a)
    mean = sum(by_draw) / judgements
    draw = draws / (draws - 1) * sum((d - JUDGED * mean) ** 2 for d in by_draw)
    times = judgements / PATIENTS  # that a patient is judged, about
    patient = sum((by_patient[p] - times * mean) ** 2 for p in range(PATIENTS)) * PATIENTS / (PATIENTS - 1)
    single = sum(len(a ^ b) for a, b in pairs)
    deviation = math.sqrt(max(draw + patient - single, draw, patient)) / judgements
    return Difference(100 * mean, 100 * float(student.ppf(0.975, draws - 1)) * deviation)


def gathered(
    results: Sequence[Mapping[str, Any]], cells: Sequence[Cell], measure: str = "accuracy"
) -> list[Played]:
    """Cells with any result of this measure, in their order."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    wrong: dict[str, dict[str, dict[int, frozenset[int]]]] = defaultdict(lambda: defaultdict(dict))
    for r in results:
        if measure not in r:
            continue
        values = found.setdefault(r["cell"], {})
        values.setdefault(r["method"], {})[r["seed"]] = 100 * r[measure]
        if "wrong" in r:
            wrong[r["cell"]][r["method"]][r["seed"]] = frozenset(r["wrong"])
        if measure == "accuracy" and r.get("public_only") is not None:
            values.setdefault(PUBLIC_ALONE, {})[r["seed"]] = 100 * r["public_only"]
    return [Played(cell, found[cell.name], wrong[cell.name]) for cell in cells if cell.name in found]


def spread(values: Values) -> str:
    """Mean ± standard deviation of single draws."""
    if not values:
        return "–"
    more = f" ± {statistics.stdev(values.values()):.1f}" if len(values) > 1 else ""
    return f"{_mean(values):.1f}{more}"


def _mean(values: Values) -> float:
    return statistics.fmean(values.values())
