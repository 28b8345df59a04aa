"""Factors of correlated noise: sensitivity against brute force, errors against matrices and jax_privacy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from modicum.errors import UserError
from modicum.privacy.factors import (
    IDENTITY,
    Banded,
    Blt,
    Factor,
    Participation,
    Workload,
    factor_from_dict,
    optimised_banded,
    optimised_blt,
    sensitivity,
    square_root,
    strategy_error,
)

FALLING = Blt((0.7, 0.2), (0.4, 0.3))


def matrix(factor: Factor, steps: int) -> np.ndarray:
    return np.tril(toeplitz(factor.column(steps)))


def patterns(taking: Participation) -> list[tuple[int, ...]]:
    """Every set of steps that the promise allows."""
    found = list[tuple[int, ...]]()
    for count in range(1, taking.most + 1):
        every = itertools.combinations(range(taking.steps), count)
        found += [at for at in every if all(b - a >= taking.separation for a, b in itertools.pairwise(at))]
    return found


def brute_force(factor: Factor, taking: Participation) -> float:
    """Over all patterns; directions by all signs and by ascent from random vectors of three coordinates."""
    rng, worst = np.random.default_rng(0), 0.0
    whole = matrix(factor, taking.steps)
    for at in patterns(taking):
        columns = whole[:, at]
        for signs in itertools.product((-1.0, 1.0), repeat=len(at) - 1):
            worst = max(worst, float(np.linalg.norm(columns @ np.array((1.0, *signs)))))
        directions = rng.standard_normal((len(at), 3))
        for _ in range(20):
            directions = columns.T @ (columns @ directions) + 1e-12
            directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        worst = max(worst, float(np.linalg.norm(columns @ directions)))
    return worst


@pytest.mark.parametrize(
    ("factor", "taking"),
    [
        (IDENTITY, Participation(8, 1, 8)),
        (IDENTITY, Participation(9, 3, 2)),
        (square_root(3), Participation(9, 3, 3)),
        (square_root(3), Participation(10, 4, 2)),
        (square_root(4), Participation(10, 4, 3)),  # the last column is cut off by the end of the run
        (Banded((1.0, 0.2, 0.9)), Participation(9, 3, 3)),  # rising, and columns do not overlap
        (square_root(5), Participation(10, 3, 4)),  # overlapping, and falling
        (FALLING, Participation(10, 3, 4)),
        (FALLING, Participation(9, 1, 9)),
        (FALLING, Participation(9, 4, 2)),
    ],
)
def test_sensitivity_is_the_largest_of_all_patterns_and_directions(factor: Factor, taking: Participation) -> None:
    assert sensitivity(factor, taking) == pytest.approx(brute_force(factor, taking), rel=1e-12)


def test_a_separation_that_is_not_kept_moves_more_than_what_is_charged() -> None:
    """The negative control of the promise: the same factor, with participations closer than its bands."""
    factor = square_root(4)
    charged = sensitivity(factor, Participation(12, 4, 3))
    assert brute_force(factor, Participation(12, 2, 3)) > 1.2 * charged


def test_bands_that_rise_and_overlap_are_refused() -> None:
    with pytest.raises(UserError, match="at most 2 bands"):
        sensitivity(Banded((1.0, 0.2, 0.9)), Participation(9, 2, 3))


@pytest.mark.parametrize(
    "workload",
    [Workload.constant(12), Workload.constant(12, 0.9), Workload(tuple(np.linspace(1, 0.2, 12)), 0.5)],
)
@pytest.mark.parametrize("factor", [IDENTITY, square_root(4), FALLING])
def test_errors_are_those_of_the_matrices(factor: Factor, workload: Workload) -> None:
    n, taking = 12, Participation(12, 4, 3)
    momentum = np.tril(toeplitz(workload.momentum ** np.arange(n)))
    adds = np.tril(np.ones((n, n))) @ np.diag(workload.steps) @ momentum
    rows = np.linalg.norm(adds @ np.linalg.inv(matrix(factor, n)), axis=1)
    error, moved = strategy_error(factor, taking, workload), sensitivity(factor, taking)
    assert error.mean == pytest.approx(moved * math.sqrt((rows**2).mean()), rel=1e-12)
    assert error.last == pytest.approx(moved * rows[-1], rel=1e-12)


@pytest.mark.parametrize("workload", [Workload.constant(15, 0.9), Workload(tuple(np.linspace(1, 0.2, 15)), 0.5)])
def test_the_slope_is_that_of_differences(workload: Workload) -> None:
    column, step = square_root(5).column(15), 1e-6

    def mean(j: int, by: float) -> float:
        return float(workload.noise(column + by * np.eye(15)[j]).mean())

    numeric = [(mean(j, step) - mean(j, -step)) / (2 * step) for j in range(15)]
    assert workload.slope(column) == pytest.approx(numeric, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("taking", "mean", "last", "alone"),
    [
        (Participation(100, 20, 5), 5.8, 7.3, (15.9, 22.4)),
        (Participation(200, 20, 10), 10.4, 13.7, (31.7, 44.7)),
        (Participation(500, 50, 10), 11.4, 14.8, (50.0, 70.7)),
        (Participation(2000, 100, 20), 22.2, 29.8, (141.5, 200.0)),
    ],
)
def test_the_square_root_against_independent_noise(
    taking: Participation, mean: float, last: float, alone: tuple[float, float]
) -> None:
    error, independent = strategy_error(square_root(taking.separation), taking), strategy_error(IDENTITY, taking)
    assert (error.mean, error.last) == (pytest.approx(mean, abs=0.06), pytest.approx(last, abs=0.06))
    assert (independent.mean, independent.last) == (
        pytest.approx(alone[0], abs=0.06),
        pytest.approx(alone[1], abs=0.06),
    )


# What jax_privacy 2.0.0 reaches on the same prefix sums, mean and last: optimize_banded_toeplitz, and its BLT.
JAX_PRIVACY = [
    (Participation(100, 20, 5), (5.73678, 7.11816), (6.02752, 7.47807)),
    (Participation(200, 20, 10), (9.98153, 12.80747), (10.58468, 13.52316)),
    (Participation(500, 50, 10), (10.88240, 13.73550), (11.49818, 14.46971)),
    (Participation(1000, 10, 100), (75.90657, 104.92114), (79.49325, 108.93606)),
    (Participation(2000, 100, 20), (20.20669, 26.00423), (21.37402, 27.37160)),
]


@pytest.mark.parametrize(("taking", "banded", "blt"), JAX_PRIVACY)
def test_optimised_factors_are_as_good_as_those_of_jax_privacy(
    taking: Participation, banded: tuple[float, float], blt: tuple[float, float]
) -> None:
    sums = Workload.constant(taking.steps)
    for factor, peer in (
        (optimised_banded(taking.separation, taking, sums), banded),
        (optimised_blt(taking, sums), blt),
    ):
        error = strategy_error(factor, taking)
        assert (error.mean, error.last) == (pytest.approx(peer[0], rel=0.01), pytest.approx(peer[1], rel=0.01))


def test_a_factor_for_the_run_s_own_momentum_is_better_than_one_for_sums() -> None:
    taking, own = Participation(200, 20, 10), Workload.constant(200, 0.9)
    for_sums = optimised_banded(20, taking, Workload.constant(200))
    assert strategy_error(optimised_banded(20, taking, own), taking, own).mean < 0.97 * (
        strategy_error(for_sums, taking, own).mean
    )


def test_nothing_is_gained_where_a_unit_is_in_every_step() -> None:
    taking = Participation(50, 1, 50)
    assert optimised_banded(1, taking, Workload.constant(50)) == IDENTITY
    blt = strategy_error(optimised_blt(taking, Workload.constant(50)), taking)
    assert blt.mean > 0.99 * strategy_error(IDENTITY, taking).mean


@pytest.mark.parametrize("factor", [IDENTITY, square_root(5), FALLING])
def test_a_factor_is_read_back_as_it_was_written(factor: Factor) -> None:
    assert factor_from_dict(factor.to_dict()) == factor


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Banded((0.5, 0.1)), "begins with 1"),
        (lambda: Banded((1.0, -0.1)), "not negative"),
        (lambda: Blt((1.0,), (0.5,)), "decays"),
        (lambda: Blt((0.9, 0.8), (0.6, 0.6)), "at most 1"),
        (lambda: Participation(10, 5, 3), "room for 2"),
        (lambda: Participation(10, 0, 1), "separation"),
        (lambda: factor_from_dict({"kind": "tree"}), "unknown factor"),
        (lambda: optimised_banded(6, Participation(20, 5, 4), Workload.constant(20)), "separation"),
    ],
)
def test_nonsense_is_refused_in_one_line(make, why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=why):
        make()
