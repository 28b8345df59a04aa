"""Factors of correlated noise: what is added in one step and partly taken back in later ones (R19).

Releases are x_t + (C⁻¹z)_t with fresh rows z_t of noise and a lower triangular Toeplitz matrix C, given by its
first column. The noise in the model after t steps is row t of A·C⁻¹ times z, where A adds up what the optimiser
makes of each step. A larger C takes more back and moves a unit further: its sensitivity is paid for in σ.

Two shapes of C are known. In a banded one, w = C⁻¹z is found from the last rows of w; its bands must not be more
than the separation of two participations, so that what one unit adds never overlaps (Choquette-Choo et al. 2023).
A BLT, whose column is a sum of few geometric series, needs a few running sums however long the run is (Dvijotham
et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from modicum.errors import UserError

Column = NDArray[np.float64]
FactorKind = Literal["banded", "blt"]

BUFFERS = 2  # running sums of a BLT: more gain at most a percent in runs of up to some thousand steps
DIGITS = 4  # of what an optimiser finds: more would depend on the processor, and gain nothing
MANY = 64  # bands, each a row of noise in memory, up to which a banded factor is chosen
LONGEST = 20_000  # steps of a run for which a factor is made: its work grows with the square


@dataclass(frozen=True)
class Banded:
    """C with these numbers on its diagonal and under it, and zeros from there on."""

    coefficients: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        first = self.coefficients[0] if self.coefficients else 0.0
        if first != 1 or not all(math.isfinite(c) and c >= 0 for c in self.coefficients):
            raise UserError("a banded factor begins with 1, and its bands are finite and not negative")

    def column(self, steps: int) -> Column:
        """The first column of C, for so many steps."""
        kept = np.array(self.coefficients[:steps])
        return np.pad(kept, (0, steps - len(kept)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"kind": "banded", "coefficients": list(self.coefficients)}


@dataclass(frozen=True)
class Blt:
    """C with c_0 = 1 and c_j = Σ_i weight_i · decay_i^(j−1): a buffered linear Toeplitz matrix."""

    decays: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.decays) != len(self.weights) or not self.decays:
            raise UserError("a BLT has as many decays as weights, at least one")
        if not all(0 <= d < 1 for d in self.decays) or not all(w >= 0 for w in self.weights):
            raise UserError("decays of a BLT lie in [0, 1), and its weights are not negative")
        if not math.fsum(self.weights) <= 1:
            raise UserError("weights of a BLT add up to at most 1, so that its column falls")

    def column(self, steps: int) -> Column:
        """The first column of C, for so many steps."""
        powers = np.array(self.decays)[:, None] ** np.arange(max(0, steps - 1))
        return np.concatenate([[1.0], np.array(self.weights) @ powers])[:steps]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"kind": "blt", "decays": list(self.decays), "weights": list(self.weights)}


Factor = Banded | Blt
IDENTITY = Banded()


def factor_from_dict(d: dict[str, Any]) -> Factor:
    """Back from a factor's `to_dict`; an unknown kind is refused."""
    match d:
        case {"kind": "banded", "coefficients": list(coefficients)}:
            return Banded(tuple(float(c) for c in coefficients))
        case {"kind": "blt", "decays": list(decays), "weights": list(weights)}:
            return Blt(tuple(float(c) for c in decays), tuple(float(c) for c in weights))
    raise UserError(f"unknown factor {d.get('kind')!r}: use banded or blt")


@dataclass(frozen=True)
class Participation:
    """How often a unit may be in a run's steps: at most `most` times, two of them at least `separation` apart."""

    steps: int
    separation: int
    most: int

    def __post_init__(self) -> None:
        if not (self.separation >= 1 and 1 <= self.steps <= LONGEST):
            raise UserError(
                f"a factor is made for 1 to {LONGEST} steps and a separation of at least 1, got {self.steps} and "
                f"{self.separation}"
            )
        if not 1 <= self.most <= self.possible:
            raise UserError(
                f"in {self.steps} steps at least {self.separation} apart there is room for {self.possible} "
                f"participations, got {self.most}"
            )

    @property
    def possible(self) -> int:
        """How often the separation lets a unit take part in all."""
        return -(-self.steps // self.separation)


@dataclass(frozen=True)
class Workload:
    """What an optimiser adds up: v ← momentum·v + x_t, model ← model + step_t·v."""

    steps: tuple[float, ...]  # step sizes, one for each step of the run
    momentum: float = 0.0

    @classmethod
    def constant(cls, steps: int, momentum: float = 0.0) -> Workload:
        """Of equal step sizes; without momentum these are prefix sums."""
        return cls((1.0,) * steps, momentum)

    @property
    def constant_steps(self) -> bool:
        """Whether all step sizes are equal, so that noise in the model follows from the first column alone."""
        return len(set(self.steps)) == 1

    def noise(self, column: Column) -> Column:
        """Variance of the noise in the model after each step, where rows of z have variance 1."""
        moved = lfilter([1.0], [1.0, -self.momentum], inverse(column))
        if self.constant_steps:
            return self.steps[0] ** 2 * np.cumsum(np.cumsum(moved) ** 2)
        return np.asarray((self._accumulated(moved) ** 2).sum(1))

    def slope(self, column: Column) -> Column:
        """The gradient of the mean of `noise` by the entries of the column."""
        back = inverse(column)
        moved = lfilter([1.0], [1.0, -self.momentum], back)
        n = len(column)
        if self.constant_steps:
            sums = np.cumsum(moved)
            by_sum = 2 * self.steps[0] ** 2 * np.arange(n, 0, -1) / n * sums
            by_moved = np.cumsum(by_sum[::-1])[::-1]
        else:
            by_row = 2 / n * np.cumsum(self._accumulated(moved)[::-1], axis=0)[::-1]
            weighted = np.array(self.steps)[:, None] * by_row
            by_moved = np.array([np.trace(weighted, -j) for j in range(n)])
        by_back = lfilter([1.0], [1.0, -self.momentum], by_moved[::-1])[::-1]
        squared = lfilter([1.0], column, back)  # back ∗ back
        return -np.correlate(by_back, squared, "full")[n - 1 :]

    def _accumulated(self, moved: Column) -> NDArray[np.float64]:
        """A·C⁻¹: entry (t, s) is what row s of z is worth in the model after step t."""
        n = len(moved)
        rows = np.zeros((n, n))
        for s in range(n):
            rows[s:, s] = moved[: n - s]
        return np.asarray(np.cumsum(np.array(self.steps)[:, None] * rows, axis=0))


def inverse(column: Column) -> Column:
    """The first column of C⁻¹."""
    impulse = np.zeros(len(column))
    impulse[0] = 1.0
    return np.asarray(lfilter([1.0], column, impulse))


def sensitivity(factor: Factor, taking: Participation) -> float:
    """max over allowed participations and directions of ‖Σ C e_t ⊗ u_t‖, exact (R19).

    Where columns do not overlap, or do not rise, what is worst is to come at once and as often as allowed, always
    in the same direction: entries are not negative, and later columns are cut off by the end of the run.
    """
    column = factor.column(taking.steps)
    bands = int(np.flatnonzero(column)[-1]) + 1
    if bands > taking.separation and np.any(np.diff(column) > 0):
        raise UserError(
            f"the sensitivity of {bands} bands that rise is not known for participations {taking.separation} "
            f"apart: use at most {taking.separation} bands"
        )
    total = np.zeros(taking.steps)
    for i in range(taking.most):
        at = i * taking.separation
        total[at:] += column[: taking.steps - at]
    return float(np.linalg.norm(total))


@dataclass(frozen=True)
class StrategyError:
    """Noise in the model in units of one step's noise at sensitivity 1: the root of the mean square over steps,
    and that after the last one."""

    mean: float
    last: float


def strategy_error(factor: Factor, taking: Participation, workload: Workload | None = None) -> StrategyError:
    """What a factor leaves in the model at a given privacy.

    Args:
        factor: C.
        taking: steps of the run, and how often a unit is in them.
        workload: what the optimiser adds up; prefix sums where there is none.

    Returns:
        The noise in the model, mean over the run and last, for noise σ = sensitivity.
    """
    variances = (workload or Workload.constant(taking.steps)).noise(factor.column(taking.steps))
    scale = sensitivity(factor, taking)
    return StrategyError(scale * math.sqrt(variances.mean()), scale * math.sqrt(variances[-1]))


def square_root(bands: int) -> Banded:
    """The square root of the prefix sums, cut to so many bands (Fichtenberger et al. 2023)."""
    coefficients = [1.0]
    for j in range(1, bands):
        coefficients.append(coefficients[-1] * (1 - 0.5 / j))
    return Banded(tuple(coefficients))


@lru_cache(maxsize=64)
def optimised_banded(bands: int, taking: Participation, workload: Workload) -> Banded:
    """The banded factor with the least mean error for a workload, found from the square root."""
    if not 1 <= bands <= min(taking.separation, taking.steps):
        raise UserError(
            f"bands lie between 1 and the separation of two participations, {taking.separation}: got {bands}"
        )

    def loss(rest: Column) -> tuple[float, Column]:
        factor = Banded((1.0, *rest))
        column = factor.column(taking.steps)
        mean = float(workload.noise(column).mean())
        moved = sensitivity(factor, taking)
        counts = _overlaps(taking, bands)
        # The logarithm of error²·sensitivity²; columns do not overlap, so sensitivity² = Σ_j counts_j·c_j².
        slope = workload.slope(column)[:bands] / mean + 2 * counts * column[:bands] / moved**2
        return math.log(mean) + 2 * math.log(moved), slope[1:]

    if bands == 1:
        return IDENTITY
    start = np.array(square_root(bands).coefficients[1:])
    found = _minimise(loss, start, (0.0, None), slope=True)
    return Banded((1.0, *(round(float(c), DIGITS) for c in found)))


def _overlaps(taking: Participation, bands: int) -> Column:
    """For each band, in how many of the participations the run is long enough for it."""
    at = np.arange(taking.most) * taking.separation
    return np.array([(at + j < taking.steps).sum() for j in range(bands)], dtype=float)


@lru_cache(maxsize=64)
def optimised_blt(taking: Participation, workload: Workload, buffers: int = BUFFERS) -> Blt:
    """The BLT with the least mean error for a workload, found from decays spread up to the separation."""

    def factor(free: Column) -> Blt:
        losses, weights = 1 / (1 + np.exp(free[:buffers])), np.exp(free[buffers:])
        weights = weights / max(1.0, weights.sum() * (1 + 1e-12))
        return Blt(tuple(float(1 - loss) for loss in losses), tuple(map(float, weights)))

    def loss(free: Column) -> float:
        chosen = factor(free)
        mean = float(workload.noise(chosen.column(taking.steps)).mean())
        return math.log(mean) + 2 * math.log(sensitivity(chosen, taking))

    reach = np.geomspace(2.0, 2.0 + taking.separation, buffers)
    start = np.concatenate([np.log(reach), np.log(0.5 / buffers) - 0.5 * np.log(reach / reach[0])])
    best = factor(_minimise(loss, start, (-12.0, 12.0), slope=False))
    shrunk = (float(f"{1 - d:.{DIGITS}g}") for d in best.decays)
    return Blt(tuple(round(1 - loss, 12) for loss in shrunk), tuple(_floor(w) for w in best.weights))


def choose_factor(
    taking: Participation, adds_up: Workload, bands: int | None = None, kind: FactorKind | None = None
) -> Factor:
    """The factor with the least noise in the model, of so many bands or as many as the separation allows."""
    if bands is not None and kind == "blt":
        raise UserError("a BLT has no bands: leave bands out, or use the factor banded")
    most = min(taking.separation, taking.steps)
    if most == 1 and bands in (None, 1):
        return IDENTITY
    if kind == "blt" or (kind is None and bands is None and most > MANY):
        return optimised_blt(taking, adds_up)
    return optimised_banded(most if bands is None else bands, taking, adds_up)


def _minimise(loss: Any, start: Column, within: tuple[float, float | None], *, slope: bool) -> Column:
    """Where L-BFGS ends; `slope` says that the loss gives its gradient as well."""
    bounds, options = [within] * len(start), {"maxiter": 500}
    fit: Any = minimize
    return np.asarray(fit(loss, start, jac=slope, method="L-BFGS-B", bounds=bounds, options=options).x)


def _floor(weight: float) -> float:
    return float(math.floor(weight * 10**DIGITS) / 10**DIGITS)
