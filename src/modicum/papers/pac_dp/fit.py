"""From chosen bounds to a curve: outliers out, four function classes, the one that predicts best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.errors import UserError
from modicum.papers.pac_dp.curve import Curve
from modicum.papers.pac_dp.grid import Matrix, best_bounds, per_seed_bounds
from modicum.papers.pac_dp.quadratic import Quadratic, least_squares, r_squared

Vector = npt.NDArray[np.float64]
Function = Callable[[Vector], Vector]
KNOTS = 65
ENOUGH_FOR_IQR = 5


@dataclass(frozen=True)
class Fit:
    """A curve, the class it comes from, and how well it fits."""

    curve: Curve
    kind: str
    r2: float  # of log C over the kept pairs
    r2_raw: float  # of C itself
    quadratic: Quadratic  # as printed, beside the curve that is used
    errors: dict[str, float]  # leave-one-out root mean square error of log C, by class
    pairs: tuple[tuple[float, float], ...]
    outliers: tuple[tuple[float, float], ...]
    at_edge: tuple[float, ...] = ()  # inputs whose best bound is the smallest or the largest that was tried

    @property
    def shape(self) -> str:
        """The class, or "constant" where the curve says the same of every budget."""
        low, high = min(self.curve.bounds), max(self.curve.bounds)
        return "constant" if high <= low * (1 + 1e-9) else self.kind


def fit_curve(matrix: Matrix, scale_free: bool = False) -> Fit:
    """F from the accuracy matrix, with a band from the seeds' own choices in `curve.about`."""
    grid = matrix.grid
    x = matrix.quietness if scale_free else grid.budgets
    unit = matrix.scale if scale_free else 1.0
    limits = (grid.bounds[0] / unit, grid.bounds[-1] / unit)

    def chosen(columns: Sequence[int]) -> list[float]:
        return [grid.bounds[j] / unit for j in columns]

    fit = fit_pairs(x, chosen(best_bounds(grid, matrix.accuracy, matrix.loss)), limits, scale_free=scale_free)
    per_seed = [chosen(columns) for columns in per_seed_bounds(matrix)]
    alone = [_best_of(fit.kind, x, own, limits) for own in per_seed]
    knots = np.array(fit.curve.inputs)
    seeds = np.array([_monotone(f(knots), limits) for f in alone])
    about = {
        "kind": fit.kind,
        "r2": fit.r2,
        "r2_raw": fit.r2_raw,
        "quadratic": asdict(fit.quadratic),
        "by_seed": per_seed,
        "leave_one_out": {k: v if np.isfinite(v) else None for k, v in fit.errors.items()},
        "pairs": fit.pairs,
        "outliers": fit.outliers,
        "band_low": seeds.min(0).tolist(),
        "band_high": seeds.max(0).tolist(),
        "seeds": len(grid.seeds),
        "scale": matrix.scale,
        "dimension": matrix.dimension,
        "records": matrix.median_records,
        "accuracy": matrix.accuracy.mean(2).tolist(),
        "grid_budgets": grid.budgets,
        "grid_bounds": grid.bounds,
    }
    return replace(fit, curve=Curve(fit.curve.inputs, fit.curve.bounds, scale_free, about))


def fit_pairs(
    x: Sequence[float] | Vector,
    bounds: Sequence[float] | Vector,
    limits: tuple[float, float],
    scale_free: bool = False,
) -> Fit:
    """The class with the least leave-one-out error of log C, made monotone and kept within `limits`."""
    order = np.argsort(x)
    budgets, chosen = np.asarray(x, float)[order], np.asarray(bounds, float)[order]
    keep = _inliers(budgets, chosen)
    kept = budgets[keep], chosen[keep]
    errors = {name: _leave_one_out(name, *kept, limits) for name in CLASSES}
    kind = min(errors, key=lambda name: errors[name])
    knots = _knots(budgets)
    values = _monotone(_best_of(kind, *kept, limits)(knots), limits)
    curve = Curve(tuple(knots.tolist()), tuple(values.tolist()), scale_free)
    fitted = np.array([curve(v) for v in kept[0]])
    return Fit(
        curve,
        kind,
        r_squared(np.log(kept[1]), np.log(fitted)),
        r_squared(kept[1], fitted),
        least_squares(*kept),
        errors,
        tuple(zip(kept[0].tolist(), kept[1].tolist(), strict=True)),
        tuple(zip(budgets[~keep].tolist(), chosen[~keep].tolist(), strict=True)),
        tuple(budgets[np.isclose(chosen, limits[0]) | np.isclose(chosen, limits[1])].tolist()),
    )


def _knots(x: Vector) -> Vector:
    """A fine logarithmic grid that holds every simulated input."""
    if len(x) == 1:
        return x
    fine = np.geomspace(x[0], x[-1], KNOTS)
    near = np.isclose(fine[:, None], x[None, :], rtol=1e-9).any(1)
    return np.sort(np.concatenate([fine[~near], x]))


def _monotone(values: Vector, limits: tuple[float, float]) -> Vector:
    """Never falling, and within the bounds that were tried: a fit has nothing to say beyond them."""
    rising: Vector = np.maximum.accumulate(np.clip(np.nan_to_num(values, nan=limits[0]), *limits))
    return rising


def _inliers(x: Vector, bounds: Vector) -> npt.NDArray[np.bool_]:
    """Pairs within 1.5 interquartile ranges of the median residual, about a robust line (Theil & Sen) in logs."""
    if len(x) < ENOUGH_FOR_IQR:
        return np.ones(len(x), bool)
    u, v = np.log(x), np.log(bounds)
    slopes = [(v[j] - v[i]) / (u[j] - u[i]) for i in range(len(u)) for j in range(i + 1, len(u))]
    residuals = v - np.median(slopes) * u
    low, high = np.percentile(residuals, [25, 75])
    reach = max(1.5 * (high - low), 1e-9)
    kept: npt.NDArray[np.bool_] = (residuals >= low - reach) & (residuals <= high + reach)
    return kept


def _leave_one_out(kind: str, x: Vector, bounds: Vector, limits: tuple[float, float]) -> float:
    if len(x) < 3:
        return 0.0 if kind == "power" else np.inf
    errors = []
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        guess = _monotone(_best_of(kind, x[rest], bounds[rest], limits)(x[i : i + 1]), limits)
        errors.append(float(np.log(guess[0] / bounds[i]) ** 2))
    return float(np.sqrt(np.mean(errors)))


def _best_of(kind: str, x: Sequence[float] | Vector, bounds: Any, limits: tuple[float, float]) -> Function:
    budgets, chosen = np.asarray(x, float), np.asarray(bounds, float)
    if len(budgets) == 0:
        raise UserError("no pairs are left to fit a clipping curve to")
    return CLASSES[kind](budgets, chosen, limits)


def _quadratic(x: Vector, bounds: Vector, limits: tuple[float, float]) -> Function:  # noqa: ARG001
    """C = αε² + βε + γ, as published; by least squares relative to C, so that small bounds count too."""
    powers = np.vander(x, min(3, len(x)))
    coefficients = np.linalg.lstsq(powers / bounds[:, None], np.ones(len(x)), rcond=None)[0]
    return lambda v: np.asarray(np.polyval(coefficients, v))


def _power(x: Vector, bounds: Vector, limits: tuple[float, float]) -> Function:  # noqa: ARG001
    """C = a·ε^b with b ≥ 0."""
    u, v = np.log(x), np.log(bounds)
    spread = float(np.sum((u - u.mean()) ** 2))
    slope = max(0.0, float(np.sum((u - u.mean()) * (v - v.mean()))) / spread) if spread > 0 else 0.0
    return lambda w: np.exp(v.mean() + slope * (np.log(w) - u.mean()))


def _piecewise(x: Vector, bounds: Vector, limits: tuple[float, float]) -> Function:
    """Two straight lines in (log ε, log C) that meet at one of the inner budgets."""
    if len(x) < 4:
        return _power(x, bounds, limits)
    u, v = np.log(x), np.log(bounds)

    def design(w: Vector, knot: float) -> Vector:
        return np.stack([np.ones_like(w), np.minimum(w, knot), np.maximum(w - knot, 0)], 1)

    fits = [(knot, np.linalg.lstsq(design(u, knot), v, rcond=None)[0]) for knot in u[1:-1]]
    knot, coefficients = min(fits, key=lambda f: float(np.sum((design(u, f[0]) @ f[1] - v) ** 2)))
    return lambda w: np.exp(design(np.log(w), knot) @ coefficients)


def _isotonic(x: Vector, bounds: Vector, limits: tuple[float, float]) -> Function:  # noqa: ARG001
    """The nearest rising sequence (pool adjacent violators), straight in between."""
    blocks: list[tuple[float, int]] = []
    for value in np.log(bounds):
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    rising = np.concatenate([np.full(n, value) for value, n in blocks])
    assert all(b >= a for a, b in pairwise(rising))
    return lambda w: np.exp(np.interp(np.log(w), np.log(x), rising))


CLASSES: dict[str, Callable[[Vector, Vector, tuple[float, float]], Function]] = {
    "quadratic": _quadratic,
    "power": _power,
    "piecewise": _piecewise,
    "isotonic": _isotonic,
}
