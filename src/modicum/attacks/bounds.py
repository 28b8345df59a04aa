"""From how well two worlds can be told apart to a lower bound on ε: exact binomial intervals, no assumptions.

Of the trials of each world the first half chooses a threshold on the score and the second half is counted, so the
counts are binomial and the choice costs nothing. `confidence` is that of the whole statement: the bounds are wrong
with probability at most 1 − confidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri

from modicum.errors import UserError
from modicum.privacy.accounting import gdp

FloatArray = NDArray[np.float64]

THRESHOLDS = 200  # tried on the first half


@dataclass(frozen=True)
class LowerBounds:
    """What the scores prove about the mechanism that made them."""

    epsilon: float  # at δ; for every mechanism
    mu: float  # for mechanisms that claim to be GDP, such as unsampled Gaussians
    delta: float
    confidence: float
    trials: int  # in each world

    @property
    def epsilon_from_mu(self) -> float:
        """The ε that a GDP mechanism has at least: tighter than `epsilon`, and for such mechanisms only."""
        return gdp.epsilon_from_mu(self.mu, self.delta) if self.mu > 0 else 0.0


def least_rate(hits: ArrayLike, trials: int, tail: float) -> FloatArray:
    """A rate that the true one undercuts with probability at most `tail` (Clopper & Pearson 1934)."""
    k = np.asarray(hits, dtype=np.float64)
    return np.asarray(np.where(k == 0, 0.0, betaincinv(np.maximum(k, 1), trials - k + 1, tail)))


def largest_rate(hits: ArrayLike, trials: int, tail: float) -> FloatArray:
    """A rate that the true one exceeds with probability at most `tail`."""
    return 1 - least_rate(trials - np.asarray(hits, dtype=np.float64), trials, tail)


def lower_bounds(present: ArrayLike, absent: ArrayLike, delta: float, confidence: float) -> LowerBounds:
    """Bounds from scores that tend to be larger in the world where the canary is present.

    (ε, δ)-privacy means TPR ≤ e^ε·FPR + δ and 1−FPR ≤ e^ε·(1−TPR) + δ for every test (Kairouz, Oh & Viswanath
    2015); GDP(μ) means Φ⁻¹(TPR) − Φ⁻¹(FPR) ≤ μ (Nasr et al. 2023).
    """
    yes, no = np.asarray(present, dtype=np.float64), np.asarray(absent, dtype=np.float64)
    if min(len(yes), len(no)) < 4:
        raise UserError("an audit needs at least 4 trials in each world")
    tail = (1 - confidence) / 4  # two bounds, two rates each
    tune, count = (yes[: len(yes) // 2], no[: len(no) // 2]), (yes[len(yes) // 2 :], no[len(no) // 2 :])
    tried = np.quantile(np.concatenate(tune), np.linspace(0, 1, THRESHOLDS))

    def proved(value: Callable[[FloatArray, FloatArray], FloatArray]) -> float:
        best = tried[[int(np.argmax(value(*_rates(*tune, tried, tail))))]]
        return max(0.0, float(value(*_rates(*count, best, tail))[0]))

    return LowerBounds(
        proved(lambda t, f: _epsilon(t, f, delta)), proved(_mu), delta, confidence, min(len(yes), len(no))
    )


def _rates(yes: FloatArray, no: FloatArray, thresholds: FloatArray, tail: float) -> tuple[FloatArray, FloatArray]:
    """For each threshold: TPR at least, FPR at most."""
    hits = (yes[:, None] >= thresholds).sum(0)
    false = (no[:, None] >= thresholds).sum(0)
    return least_rate(hits, len(yes), tail), largest_rate(false, len(no), tail)


def _epsilon(tpr: FloatArray, fpr: FloatArray, delta: float) -> FloatArray:
    with np.errstate(divide="ignore"):
        one_way = np.log(np.maximum(tpr - delta, 0.0)) - np.log(fpr)
        other_way = np.log(np.maximum(1 - fpr - delta, 0.0)) - np.log1p(-tpr)
    return np.asarray(np.maximum(one_way, other_way))


def _mu(tpr: FloatArray, fpr: FloatArray) -> FloatArray:
    return np.asarray(ndtri(tpr) - ndtri(fpr))
