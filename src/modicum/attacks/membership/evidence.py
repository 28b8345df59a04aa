"""What scores of members and of others prove: rates with exact intervals, and what so few records cannot show.

A threshold is chosen on one half and counted on the other, so that counts are binomial (Clopper–Pearson). A rate
at a false-positive rate that the others are too few for is "unsupported": it is shown, and never as evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from modicum.attacks.bounds import FloatArray, largest_rate, least_rate
from modicum.errors import UserError

CONFIDENCE = 0.95
AT = (0.01, 0.001)  # false-positive rates that are reported


def needed(fpr: float) -> int:
    """Non-members that a false-positive rate needs: 10,000 for 1%, 50,000 for 0.1%."""
    return round((100 if fpr >= 0.01 else 50) / fpr)


@dataclass(frozen=True)
class Rate:
    """True positives at a nominal false-positive rate, counted on the second half."""

    fpr: float  # nominal: what the threshold was chosen for
    tpr: float
    low: float
    high: float
    false: float  # positives among the others, as counted
    false_low: float
    false_high: float
    members: int  # counted: of the second half
    others: int  # all that there were, both halves
    supported: bool
    seeds: int = 1  # of training: the clusters

    @property
    def inverted(self) -> bool:
        """Below its own false-positive rate for certain: a score with the wrong sign, not privacy."""
        return self.high < self.false_low

    def told(self) -> str:
        """With its interval, and whether it is evidence."""
        shown = f"{self.tpr:.2%} [{self.low:.2%}, {self.high:.2%}]"
        return shown if self.supported else f"{shown} unsupported"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "inverted": self.inverted}


@dataclass(frozen=True)
class Auc:
    """The chance that a member scores higher than another, with a 95% interval (Hanley & McNeil 1982)."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high


def halves(scores: FloatArray, seed: int) -> tuple[FloatArray, FloatArray]:
    """By a public coin: the order of records must not decide."""
    order = np.random.default_rng([seed, 36]).permutation(len(scores))
    return scores[order[: len(order) // 2]], scores[order[len(order) // 2 :]]


def rate_at(members: FloatArray, others: FloatArray, fpr: float, *, seed: int = 0) -> Rate:
    """The rate at one nominal false-positive rate."""
    tune, count = halves(others, seed)
    _, mine = halves(members, seed + 1)
    if min(len(tune), len(mine)) < 2:
        raise UserError("membership needs at least 4 members and 4 others")
    threshold = float(np.quantile(tune, 1 - fpr, method="higher"))
    hits, false = int((mine > threshold).sum()), int((count > threshold).sum())
    tail = (1 - CONFIDENCE) / 2
    return Rate(
        fpr,
        hits / len(mine),
        float(least_rate(hits, len(mine), tail)),
        float(largest_rate(hits, len(mine), tail)),
        false / len(count),
        float(least_rate(false, len(count), tail)),
        float(largest_rate(false, len(count), tail)),
        len(mine),
        len(others),
        len(others) >= needed(fpr),
    )


def rate_from(told: Mapping[str, Any]) -> Rate:
    """A rate from its plain values (`to_dict`)."""
    return Rate(**{name: value for name, value in told.items() if name != "inverted"})


def pooled(rates: Sequence[Rate]) -> Rate:
    """One rate over runs with other splits and seeds: each has a threshold of its own, and others add up.

    Records of one run share its model, so that runs, not records, are independent: an interval is at least as wide
    as that over runs (`clusters`), and at least as wide as if all records were independent.
    """
    first = rates[0]
    if len({rate.fpr for rate in rates}) != 1:
        raise UserError("rates at different false-positive rates do not add up")
    others = sum(rate.others for rate in rates)
    tpr = _over_runs([rate.tpr for rate in rates], [rate.members for rate in rates])
    false = _over_runs([rate.false for rate in rates], [rate.others - rate.others // 2 for rate in rates])
    members = sum(rate.members for rate in rates)
    return Rate(first.fpr, *tpr, *false, members, others, others >= needed(first.fpr), len(rates))


def _over_runs(values: Sequence[float], trials: Sequence[int]) -> tuple[float, float, float]:
    hits, total, tail = (
        round(sum(v * n for v, n in zip(values, trials, strict=True))),
        sum(trials),
        (1 - CONFIDENCE) / 2,
    )
    low, high = float(least_rate(hits, total, tail)), float(largest_rate(hits, total, tail))
    if len(values) == 1:
        return values[0], low, high
    mean, below, above = clusters(list(values))
    return mean, max(0.0, min(low, below)), min(1.0, max(high, above))


def auc(members: FloatArray, others: FloatArray) -> Auc:
    """Area under the ROC curve of two sets of scores, with Hanley and McNeil's normal interval."""
    ranks = rankdata(np.concatenate([members, others]))
    m, n = len(members), len(others)
    area = float((ranks[:m].sum() - m * (m + 1) / 2) / (m * n))
    q1, q2 = area / (2 - area), 2 * area * area / (1 + area)
    variance = (area * (1 - area) + (m - 1) * (q1 - area**2) + (n - 1) * (q2 - area**2)) / (m * n)
    reach = float(ndtri(0.5 + CONFIDENCE / 2)) * float(np.sqrt(max(variance, 0.0)))
    return Auc(area, area - reach, area + reach)


@dataclass(frozen=True)
class Roc:
    """True-positive rates with bands at many false-positive rates; at each, all records are counted."""

    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def roc(members: FloatArray, others: FloatArray, points: int = 60) -> Roc:
    """For pictures: bands are pointwise, and the smallest false-positive rate is one of the others."""
    at = np.geomspace(1 / max(2, len(others)), 1.0, points)
    thresholds = np.quantile(others, 1 - at, method="higher")
    thresholds[-1] = -np.inf
    hits = (members[:, None] > thresholds).sum(0)
    tail = (1 - CONFIDENCE) / 2
    low, high = least_rate(hits, len(members), tail), largest_rate(hits, len(members), tail)
    lists = (v.tolist() for v in (at, hits / len(members), low, high))
    return Roc(*(tuple(values) for values in lists))


def clusters(values: list[float]) -> tuple[float, float, float]:
    """Mean over seeds of training and its 95% interval: seeds, not records, are what is independent."""
    from scipy.stats import t

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, -np.inf, np.inf
    reach = float(t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return mean, mean - reach, mean + reach
