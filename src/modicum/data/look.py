"""What came out of a look: figures with error bars from the known noise, as a file that training reads.

Everything is computed from the noised means of one release, from public constants and from the variance of the
noise. Errors are of the noise alone: one standard deviation, or ranges of two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.core import statistics
from modicum.core.statistics import Questions
from modicum.data.asked import AskedColumn
from modicum.data.columns import Column
from modicum.errors import DAMAGED, UserError
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec

FILE = "look.json"
SCHEMA = "modicum-look/1"
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
ENOUGH = 3.0  # standard deviations that a count stands above its noise, or nothing is divided by it

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A number and the standard deviation of the noise in it."""

    value: float
    error: float


@dataclass(frozen=True)
class Quantile:
    """A quantile, and between what it lies, up to two standard deviations of the noise."""

    share: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ColumnFigures:
    """One column. What was not asked, or drowns in noise, is None or empty."""

    column: AskedColumn
    missing: Figure
    mean: Figure | None = None
    deviation: Figure | None = None
    bars: tuple[float, ...] = ()  # records in each, from the lowest value or in the categories' order
    bar_error: float = 0.0
    quantiles: tuple[Quantile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Look:
    """The figures of one look, what they cost each client, and which training was planned when it was taken."""

    run: str
    sizes: Mapping[str, int]  # records of each client, which are public
    spec: PrivacySpec
    releases: Mapping[str, tuple[PlannedRelease, ...]]  # of each client: what a training's certificate adds up
    classes: tuple[Figure, ...] = ()  # records of each class
    labels: tuple[str, ...] = ()
    columns: tuple[ColumnFigures, ...] = ()
    correlations: tuple[tuple[Figure, ...], ...] = ()  # rows in the columns' order; missing values in the middle
    costs: Mapping[str, float] | None = None  # ε of each block alone; together they cost less than their sum
    planned: Mapping[str, Any] | None = None  # the training's settings that its plan follows from
    planned_before: bool = False  # whether the training that reads it has these settings (R2)
    folder: Path | None = field(default=None, repr=False, compare=False)  # where its ledger lies

    @property
    def records(self) -> int:
        """Of all clients."""
        return sum(self.sizes.values())

    def column(self, name: str) -> ColumnFigures | None:
        """The figures of this column, if it was looked at."""
        return next((one for one in self.columns if one.column.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "sizes": dict(self.sizes),
            "spec": self.spec.to_dict(),
            "releases": {name: [r.to_dict() for r in own] for name, own in self.releases.items()},
            "classes": [asdict(one) for one in self.classes],
            "labels": list(self.labels),
            "columns": [asdict(one) for one in self.columns],
            "correlations": [[asdict(one) for one in row] for row in self.correlations],
            "costs": dict(self.costs or {}),
            "planned": dict(self.planned or {}),
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Look:
        """Back from `to_dict`."""
        if d["schema"] != SCHEMA:
            raise ValueError(f"its schema is {d['schema']!r}, and this version reads {SCHEMA!r}")
        return cls(
            run=str(d["run"]),
            sizes={str(name): int(size) for name, size in d["sizes"].items()},
            spec=PrivacySpec.from_dict(d["spec"]),
            releases={
                str(name): tuple(PlannedRelease.from_dict(r) for r in own) for name, own in d["releases"].items()
            },
            classes=tuple(Figure(**one) for one in d["classes"]),
            labels=tuple(str(name) for name in d["labels"]),
            columns=tuple(_column_figures(one) for one in d["columns"]),
            correlations=tuple(tuple(Figure(**one) for one in row) for row in d["correlations"]),
            costs=dict(d["costs"]),
            planned=dict(d["planned"]),
        )

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Look:
        """The look of a run folder, or of its `look.json` alone."""
        file = Path(path) / FILE if Path(path).is_dir() else Path(path)
        try:
            found = cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
            return replace(found, folder=file.parent)
        except OSError as error:
            raise UserError(
                f"there is no look in {path} ({error.strerror}): take one with modicum look FILE --out {path}"
            ) from None
        except (*DAMAGED, UserError) as error:
            raise UserError(f"{file} is no look ({error}): take an intact folder") from None

    def refined(self, columns: Mapping[str, Column], use: str) -> dict[str, Column]:
        """Columns with this look's figures in place: `standardise`, `impute` or `ranges`."""
        return {name: _refined(column, self.column(name), use) for name, column in columns.items()}

    def weights(self) -> list[float]:
        """Of classes: n/(K·n_k), with counts that noise drowns taken at what the noise could be."""
        if not self.classes:
            raise UserError(f"the look {self.run} counted no classes: ask for them with --statistics classes,…")
        counts = [max(one.value, 2 * one.error, 1.0) for one in self.classes]
        return [sum(counts) / (len(counts) * count) for count in counts]


def paid(plan: PrivacyPlan, run: str) -> tuple[PlannedRelease, ...]:
    """What a client released in a look with this plan, as the plan of a later training lists it."""
    return tuple(replace(r, purpose=f"look:{run}") for r in plan.releases)


def _column_figures(d: Mapping[str, Any]) -> ColumnFigures:
    about = d["column"]
    dates = None if about["dates"] is None else (str(about["dates"][0]), str(about["dates"][1]))
    asked = AskedColumn(about["name"], about["low"], about["high"], tuple(about["categories"]), dates)
    one = {name: None if d[name] is None else Figure(**d[name]) for name in ("mean", "deviation")}
    quantiles = tuple(Quantile(**q) for q in d["quantiles"])
    bars = tuple(d["bars"])
    bar_error = float(d["bar_error"])
    return ColumnFigures(asked, Figure(**d["missing"]), **one, bars=bars, bar_error=bar_error, quantiles=quantiles)


def _refined(column: Column, figures: ColumnFigures | None, use: str) -> Column:
    """A column of numbers that was looked at; others stay as they are."""
    if figures is None or column.range is None:
        return column
    if use == "standardise" and figures.mean is not None and figures.deviation is not None:
        return replace(column, mean=figures.mean.value, deviation=figures.deviation.value)
    if use == "impute" and figures.mean is not None:
        return replace(column, fill=figures.mean.value)
    if use == "ranges" and figures.quantiles:
        low, high = figures.quantiles[0].value, figures.quantiles[-1].value
        return replace(column, range=(low, high)) if low < high else column
    return column


def figures(
    answers: Numbers,
    noise: Mapping[str, float],
    questions: Questions,
    columns: Sequence[AskedColumn],
    records: int,
) -> dict[str, Any]:
    """Fields of a `Look` from the mean of every number over the records and its noise by block."""
    parts, start = dict[str, Numbers](), 0
    for name, block in questions.blocks.items():
        parts[name] = np.asarray(answers[start : start + block.size], float)
        start += block.size
    classes = _classes(parts, noise, records)
    seen = columns if statistics.MISSING in parts else ()  # where classes alone are counted, nothing of columns
    own = [_of_column(i, asked, parts, noise, questions.bins, records) for i, asked in enumerate(seen)]
    return {"classes": classes, "columns": tuple(own), "correlations": _correlations(parts, noise, columns)}


def _classes(parts: Mapping[str, Numbers], noise: Mapping[str, float], records: int) -> tuple[Figure, ...]:
    """Counts that add up to the public number of records: part of the noise is known and taken away."""
    if statistics.CLASSES not in parts:
        return ()
    shares = parts[statistics.CLASSES]
    shares = shares + (1 - shares.sum()) / len(shares)
    error = noise[statistics.CLASSES] * math.sqrt(1 - 1 / len(shares))
    return tuple(Figure(max(0.0, float(share) * records), error * records) for share in shares)


def _of_column(
    i: int, asked: AskedColumn, parts: Mapping[str, Numbers], noise: Mapping[str, float], bins: int, records: int
) -> ColumnFigures:
    missing, error = float(parts[statistics.MISSING][i]), noise[statistics.MISSING]
    found = ColumnFigures(asked, Figure(min(1.0, max(0.0, missing)), error))
    there = 1 - found.missing.value
    if statistics.MEANS in parts and not asked.categories and there > ENOUGH * error:
        found = replace(found, **_moments(i, asked, parts, noise, there))
    if statistics.HISTOGRAMS in parts:
        bars = parts[statistics.HISTOGRAMS].reshape(-1, bins)[i]
        found = replace(found, **_bars(asked, bars, noise, missing, records, bins))
    return found


def _moments(
    i: int, asked: AskedColumn, parts: Mapping[str, Numbers], noise: Mapping[str, float], there: float
) -> dict[str, Any]:
    """Mean and deviation of the values that are there, from sums over all records of values from −1 to 1."""
    gone, half = noise[statistics.MISSING], (asked.high - asked.low) / 2
    mean = float(parts[statistics.MEANS][i]) / there
    mean_error = math.hypot(noise[statistics.MEANS], mean * gone) / there
    mean = min(1.0, max(-1.0, mean))
    centred = float(parts[statistics.SQUARES][i]) / there
    square_error = math.hypot(noise[statistics.SQUARES], centred * gone) / there
    variance = centred + 0.5 - mean**2 + mean_error**2
    error = math.hypot(square_error, 2 * mean * mean_error)
    # Where noise hides the deviation, what it could be: features are then scaled too little, never blown up.
    deviation = math.sqrt(max(variance, 2 * error if variance <= 2 * error else 0.0, 1e-6))
    return {
        "mean": Figure(asked.place((mean + 1) / 2), mean_error * half),
        "deviation": Figure(deviation * half, error / (2 * deviation) * half),
    }


def _bars(
    asked: AskedColumn, bars: Numbers, noise: Mapping[str, float], missing: float, records: int, bins: int
) -> dict[str, Any]:
    """Bars that agree with the missing share, as far as the two noises say whom to believe; then quantiles."""
    error, gone = noise[statistics.HISTOGRAMS], noise[statistics.MISSING]
    all_bars = bins * error**2
    trust = gone**2 / (gone**2 + all_bars) if all_bars else 1.0  # in the bars; nothing is noisy at ε = ∞
    total = trust * bars.sum() + (1 - trust) * (1 - missing)
    total_error = math.sqrt(trust * all_bars)
    bars = bars + (total - bars.sum()) / bins
    shown = bars[: len(asked.categories)] if asked.categories else bars
    found: dict[str, Any] = {
        "bars": tuple(float(max(0.0, bar)) * records for bar in shown),
        "bar_error": error * records,
    }
    if not asked.categories and total > ENOUGH * total_error:
        found["quantiles"] = _quantiles(asked, bars, error, float(total), total_error)
    return found


def _quantiles(
    asked: AskedColumn, bars: Numbers, error: float, total: float, total_error: float
) -> tuple[Quantile, ...]:
    """Where the share of values below passes q: linear within a bar, and where it passes it give or take 2σ."""
    size = len(bars)
    at = np.arange(size + 1) / size
    below = np.concatenate([[0.0], np.cumsum(bars)]) / total
    # Of k bars of B whose total is known: k(1 − k/B) of one bar's variance; and the total's own error.
    spread = np.hypot(np.sqrt(size * at * (1 - at)) * error, np.abs(at - below) * total_error) / total

    def where(share: float, off: float) -> float:
        rising = np.maximum.accumulate(np.clip(below + off * spread, 0.0, 1.0))
        passed = max(1, int(np.searchsorted(rising, share)))  # the first edge with so much below it
        under, over = rising[passed - 1], rising[passed]
        part = (share - under) / (over - under) if over > under else 0.0
        return asked.place(float(at[passed - 1] + part / size))

    return tuple(Quantile(q, where(q, 0.0), where(q, 2.0), where(q, -2.0)) for q in QUANTILES)


def _correlations(
    parts: Mapping[str, Numbers], noise: Mapping[str, float], columns: Sequence[AskedColumn]
) -> tuple[tuple[Figure, ...], ...]:
    """Of columns whose missing values stand in the middle of their range, which is what was summed.

    Nothing is said of categories, whose order means nothing, nor of what stands too close to its noise.
    """
    if statistics.PRODUCTS not in parts:
        return ()
    mean, there = parts[statistics.MEANS], 1 - np.clip(parts[statistics.MISSING], 0, 1)
    variance = parts[statistics.SQUARES] + there / 2 - mean**2 + noise[statistics.MEANS] ** 2
    off = np.hypot(noise[statistics.SQUARES], noise[statistics.MISSING] / 2)
    off = np.hypot(off, 2 * mean * noise[statistics.MEANS])
    rows = [[Figure(1.0, 0.0) for _ in columns] for _ in columns]
    for place, (i, j) in enumerate(combinations(range(len(columns)), 2)):
        vi, vj = float(variance[i]), float(variance[j])
        if min(vi / off[i], vj / off[j]) <= ENOUGH or columns[i].categories or columns[j].categories:
            rows[i][j] = rows[j][i] = Figure(0.0, 1.0)
            continue
        shared = float(parts[statistics.PRODUCTS][place] - mean[i] * mean[j])
        direct = math.hypot(
            noise[statistics.PRODUCTS], mean[i] * noise[statistics.MEANS], mean[j] * noise[statistics.MEANS]
        )
        value = shared / math.sqrt(vi * vj)
        error = math.hypot(direct / math.sqrt(vi * vj), value / 2 * math.hypot(off[i] / vi, off[j] / vj))
        rows[i][j] = rows[j][i] = Figure(min(1.0, max(-1.0, value)), min(1.0, error))
    return tuple(tuple(row) for row in rows)
