"""Correlated noise in plans and events: one Gaussian for a whole run, whatever order its releases depend on (R19).

All of a client's releases together are x + C⁻¹z with rows z of noise σ·bound, so they cost what one Gaussian with
multiplier σ/sensitivity costs. A plan of k releases says the same in the ledger's own words: each is worth
z = σ·√k/sensitivity, since k Gaussians of multiplier z compose to μ = √k/z. The number by which the rows' noise
must be larger than what a release is worth, sensitivity/√k, is the `scale`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from modicum.privacy.factors import Factor, Participation, factor_from_dict, inverse, sensitivity

ROUNDING = 1e-12  # relative: a scale that was written down and read back


@dataclass(frozen=True)
class Rows:
    """What a release says of its noise: the factor of its rows, and how much larger they are than its worth."""

    factor: str  # digest of factor and number of steps
    scale: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"factor": self.factor, "scale": self.scale}


@dataclass(frozen=True)
class Correlation:
    """What a plan says: the factor, and the promise that its scale rests on (see `Participation`)."""

    factor: Factor
    steps: int
    separation: int
    scale: float  # of one row's noise over what a release is worth

    @classmethod
    def of(cls, factor: Factor, taking: Participation) -> Correlation:
        """With the least scale that covers so many participations."""
        scale = sensitivity(factor, taking) / math.sqrt(taking.most)
        return cls(factor, taking.steps, taking.separation, scale)

    @cached_property
    def digest(self) -> str:
        """Names the factor: the same for all clients whose noise is one sum's."""
        text = json.dumps([self.factor.to_dict(), self.steps], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def rows(self) -> Rows:
        """What each release under this plan says."""
        return Rows(self.digest, self.scale)

    def sensitivity(self, participations: int) -> float:
        """How far one unit moves C·x, in units of its bound."""
        return sensitivity(self.factor, Participation(self.steps, self.separation, participations))

    def problem(self, participations: int) -> str | None:
        """Why the scale does not cover so many participations, computed anew; None where it does."""
        needed = self.sensitivity(participations) / math.sqrt(participations)
        if self.scale >= needed * (1 - ROUNDING):
            return None
        return f"its noise is scaled by {self.scale:.6g}, and the factor's sensitivity asks for {needed:.6g}"

    def out_of_turn(self, last: int | None, first: int, count: int) -> str | None:
        """Why batches that come in turn may not take these rows now; None where they may.

        Rows are taken one after another, none twice and none left out: then a unit is in every `separation`-th.
        """
        due = 0 if last is None else last + 1
        if first != due:
            return f"row {due} is due, and it asks for {first}"
        return None if first + count <= self.steps else f"its factor was made for {self.steps} steps"

    def spread(self, first: int, count: int) -> float:
        """Standard deviation of the sum of so many successive rows, from this one on, over that of a row of z."""
        return _spread(self.factor, first, count)

    def too_early(self, last: int | None, number: int) -> str | None:
        """Why a unit may not be in this step, having last been in another; None where it may."""
        if not 0 <= number < self.steps:
            return f"step {number} is not among the {self.steps} that its factor was made for"
        if last is not None and number - last < self.separation:
            return f"it was in step {last}, and may be in {last + self.separation} next: {number} is too early"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {
            "factor": self.factor.to_dict(),
            "steps": self.steps,
            "separation": self.separation,
            "scale": self.scale,
        }


@dataclass(frozen=True)
class Correlated:
    """A run's noise schedule: rows mixed by one factor, for units whose steps are at least `separation` apart."""

    factor: Factor
    steps: int
    separation: int

    def terms(self, participations: int) -> Correlation:
        """What the plan of a unit says that takes part so often."""
        return Correlation.of(self.factor, Participation(self.steps, self.separation, participations))

    def spread(self, number: int) -> float:
        """Standard deviation of what is added in this step, over that of a row."""
        return _spread(self.factor, number, 1)


@lru_cache(maxsize=4096)
def _spread(factor: Factor, first: int, count: int) -> float:
    """‖(1, …, 1)·rows of C⁻¹‖: each row of z is in the sum as often as its column of C⁻¹ has entries there."""
    sums = np.concatenate([[0.0], np.cumsum(inverse(factor.column(first + count)))])
    ends = np.arange(first + count, 0, -1)
    return float(np.linalg.norm(sums[ends] - sums[np.maximum(ends - count, 0)]))


def correlation_from_dict(d: dict[str, Any]) -> Correlation | None:
    """The correlation of a planned release; None where its noise is independent, which says nothing."""
    if "correlated" not in d:
        return None
    c = d["correlated"]
    factor, (steps, separation) = factor_from_dict(c["factor"]), (int(c["steps"]), int(c["separation"]))
    return Correlation(factor, steps, separation, float(c["scale"]))


def rows_from_dict(d: dict[str, Any]) -> Rows | None:
    """The same of a release."""
    return Rows(str(d["correlated"]["factor"]), float(d["correlated"]["scale"])) if "correlated" in d else None


def correlated_to_dict(correlated: Correlation | Rows | None) -> dict[str, Any]:
    """Independent noise says nothing, as it always has."""
    return {} if correlated is None else {"correlated": correlated.to_dict()}
