"""Fits: the right class, outliers out, monotone whatever the pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.papers.pac_dp.fit import CLASSES, fit_curve, fit_pairs
from modicum.papers.pac_dp.grid import Grid, Matrix
from modicum.papers.pac_dp.quadratic import least_squares

X = np.geomspace(0.05, 5, 8)
LIMITS = (1e-3, 1e3)


def test_a_power_law_is_found_and_predicts() -> None:
    fit = fit_pairs(X, 0.7 * X**0.5, LIMITS)
    assert fit.errors["power"] < 1e-9
    assert fit.r2 == pytest.approx(1.0)
    assert fit.curve(0.33) == pytest.approx(0.7 * 0.33**0.5, rel=2e-3)


def test_a_kink_prefers_the_piecewise_line() -> None:
    bounds = np.where(X < 0.7, 0.2, 0.2 * (X / 0.7) ** 1.5)
    errors = fit_pairs(X, bounds, LIMITS).errors
    assert min(errors["piecewise"], errors["isotonic"]) < errors["power"]


def test_the_published_quadratic_is_fitted_where_it_rises() -> None:
    x = np.linspace(0.05, 1.0, 8)
    fit = fit_pairs(x, -5.5235 * x**2 + 12.0719 * x + 1.4004, LIMITS)
    assert fit.kind == "quadratic"
    assert fit.r2 > 0.999


def test_the_printed_quadratic_is_least_squares_of_the_bounds() -> None:
    """Through (1, 1), (2, 3), (3, 7) goes C = ε² − ε + 1, and its R² is 1.

    Through (1, 1), (2, 3), (3, 2), (4, 4) least squares gives C = .8ε + .5: of the spread 5 it leaves 1.8.
    """
    exact = least_squares(np.array([1.0, 2, 3]), np.array([1.0, 3, 7]))
    assert (exact.alpha, exact.beta, exact.gamma, exact.r2) == pytest.approx((1, -1, 1, 1))
    near = least_squares(np.array([1.0, 2, 3, 4]), np.array([1.0, 3, 2, 4]))
    assert (near.alpha, near.beta, near.gamma, near.r2) == pytest.approx((0, 0.8, 0.5, 0.64))


def test_r2_is_told_of_the_bounds_and_of_their_logarithms() -> None:
    """A wrong large bound hardly shows in logarithms and rules the R² of C."""
    fit = fit_pairs(X, 0.7 * X**0.5, LIMITS)
    assert fit.r2_raw == pytest.approx(1.0)
    rough = fit_pairs(X, np.array([0.05, 0.1, 0.05, 0.2, 0.1, 1.0, 0.5, 5.0]), (0.05, 5.0))
    assert rough.r2_raw != pytest.approx(rough.r2, abs=0.01)


def test_one_wild_pair_is_an_outlier() -> None:
    bounds = 0.7 * X**0.5
    bounds[3] *= 40
    fit = fit_pairs(X, bounds, LIMITS)
    assert len(fit.outliers) == 1
    assert fit.outliers[0] == pytest.approx((X[3], bounds[3]))
    assert fit.curve(X[3]) == pytest.approx(0.7 * X[3] ** 0.5, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.05, 0.1, 0.5, 1.0, 5.0]), min_size=1, max_size=8))
def test_every_fit_is_positive_and_never_falls(bounds: list[float]) -> None:
    """`Curve` itself refuses anything else, so making it is the check; and it stays within what was tried."""
    curve = fit_pairs(X[: len(bounds)], bounds, (0.05, 5.0)).curve
    assert 0.05 <= curve(1e-9) <= curve(1e9) <= 5.0


def test_unconstrained_classes_do_fall_on_such_pairs() -> None:
    """The negative control: without the monotone step a quadratic falls here."""
    f = CLASSES["quadratic"](X, np.array([0.1, 0.2, 0.5, 2.0, 2.0, 0.5, 0.2, 0.1]), LIMITS)
    assert np.any(np.diff(f(X)) < 0)


def matrix(best: list[int], seeds: int = 3) -> Matrix:
    grid = Grid((0.1, 0.3, 1.0, 3.0), (0.1, 0.5, 2.0), tuple(range(seeds)))
    accuracy = np.full((4, 3, seeds), 0.5)
    for i, j in enumerate(best):
        accuracy[i, j] = 0.9
    quiet = (1.0, 3.0, 10.0, 30.0)
    return Matrix(grid, accuracy, 1 - accuracy, quiet, 0.25, 100.0, 50, (9.0, 3.0, 1.0, 0.3))


def test_the_matrix_gives_the_argmax_and_a_band() -> None:
    fit = fit_curve(matrix([0, 0, 1, 2]))
    assert fit.pairs == ((0.1, 0.1), (0.3, 0.1), (1.0, 0.5), (3.0, 2.0))
    about = fit.curve.about
    assert about["quadratic"]["r2"] == pytest.approx(fit.quadratic.r2)
    assert about["by_seed"] == [[0.1, 0.1, 0.5, 2.0]] * 3
    assert len(about["band_low"]) == len(fit.curve.inputs)
    assert all(a <= b for a, b in zip(about["band_low"], about["band_high"], strict=True))


def test_a_scale_free_fit_is_relative_to_the_public_norm() -> None:
    fit = fit_curve(matrix([0, 0, 1, 2]), scale_free=True)
    assert fit.curve.scale_free
    assert fit.pairs[-1] == (30.0, 8.0)


def test_bounds_at_the_edge_of_the_grid_are_told() -> None:
    bounds = np.array([LIMITS[0], *np.linspace(0.5, 1.0, len(X) - 2), LIMITS[1]])
    assert fit_pairs(X, bounds, LIMITS).at_edge == (X[0], X[-1])
    assert fit_pairs(X, np.full(len(X), 0.5), LIMITS).at_edge == ()


def test_a_constant_is_called_one() -> None:
    assert fit_pairs(X, np.full(len(X), 0.5), LIMITS).shape == "constant"
    rising = fit_pairs(X, 0.7 * X**0.5, LIMITS)
    assert rising.shape == rising.kind
