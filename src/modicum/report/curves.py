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


def accuracy(records: Sequence[RoundRecord]) -> ByRound:
    """Round → test accuracy, where it was looked at (simulated ground truth)."""
    return _simulated(records, "test_accuracy")


def personalised(records: Sequence[RoundRecord]) -> ByRound:
    """Round → mean accuracy of clients' own models on their own test records (simulated ground truth)."""
    return _simulated(records, "personalised_accuracy")


def loss(records: Sequence[RoundRecord]) -> ByRound:
    """Round → test loss, where it was looked at (simulated ground truth)."""
    return _simulated(records, "test_loss")


def bound(records: Sequence[RoundRecord]) -> ByRound:
    """Round → median bound, where one was told."""
    return {r.round + 1: r.bound for r in records if clipped(r)}


CURVES: Mapping[str, Callable[[Sequence[RoundRecord]], ByRound]] = {
    "accuracy": accuracy,
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
