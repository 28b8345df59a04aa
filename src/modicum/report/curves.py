"""Values by round, of one run or in the mean over seeds: what pictures and pages draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord

ByRound = dict[int, float]
Band = tuple[int, float, float, float]
"""Round, mean, least and most over the seeds that have it."""


def main_metric(records: Sequence[RoundRecord]) -> str:
    """The task's main metric, which a round's test figures begin with."""
    told = (name for record in records for name in record.simulated if name.startswith("test_"))
    return next(told, "test_accuracy").removeprefix("test_")


def score(records: Sequence[RoundRecord]) -> ByRound:
    """Round → the task's main metric on the test data, where it was looked at (simulated ground truth)."""
    return _simulated(records, f"test_{main_metric(records)}")


def personalised(records: Sequence[RoundRecord]) -> ByRound:
    """Round → the same of clients' own models on their own test records, in the mean (simulated ground truth)."""
    return _simulated(records, f"personalised_{main_metric(records)}")


def loss(records: Sequence[RoundRecord]) -> ByRound:
    """Round → test loss, where it was looked at (simulated ground truth)."""
    return _simulated(records, "test_loss")


def bound(records: Sequence[RoundRecord]) -> ByRound:
    """Round → median bound, where one was told."""
    return {r.round + 1: r.bound for r in records if clipped(r)}


CURVES: Mapping[str, Callable[[Sequence[RoundRecord]], ByRound]] = {
    "accuracy": score,
    "personalised": personalised,
    "loss": loss,
    "bound": bound,
}


def clipped(record: RoundRecord) -> bool:
    """Whether every client that was asked had a bound that is one."""
    values = record.bounds.values()
    return bool(values) and math.isfinite(sum(values)) and min(values) > 0


def band(seeds: Sequence[ByRound]) -> list[Band]:
    """Mean and range over seeds, of the rounds that any seed has; runs may end early."""
    found = []
    for round in sorted({round for one in seeds for round in one}):
        values = [one[round] for one in seeds if round in one and math.isfinite(one[round])]
        if values:
            found.append((round, fmean(values), min(values), max(values)))
    return found


def _simulated(records: Sequence[RoundRecord], name: str) -> ByRound:
    return {r.round + 1: r.simulated[name] for r in records if name in r.simulated}
