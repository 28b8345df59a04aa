import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm

from modicum.errors import UserError
from modicum.privacy.accounting import gdp, pld, rdp
from modicum.privacy.accounting.gaussians import Gaussians
from modicum.privacy.accounting.pairs import Direction, Pair
from modicum.privacy.spec import Adjacency

ZO, AR, RO = Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE

ORACLES = [
    (ZO, 1.0, 1.0, 1, 4.3772),
    (ZO, 0.01, 4.0, 10_000, 0.9470),
    (ZO, 256 / 6e4, 1.1, 14_063, 2.3818),
    (ZO, 0.1, 1.0, 100, 7.0466),
    (ZO, 0.0128, 1.0, 7_900, 7.2213),
    (ZO, 128 / 1200, 13.69, 1_172, 0.9996),
    (RO, 0.1, 1.0, 100, 10.516),
    (RO, 0.1, 2.0, 100, 4.368),
    (RO, 0.01, 4.0, 10_000, 1.993),
    (RO, 128 / 1200, 13.69, 1_172, 2.142),
]


@pytest.mark.parametrize(("adjacency", "q", "z", "count", "expected"), ORACLES)
def test_oracles(adjacency, q, z, count, expected):
    assert pld.epsilon([Gaussians(z, q, count)], 1e-5, adjacency) == pytest.approx(expected, rel=4e-4)


# --- exact truths: one step in closed form, two steps by quadrature, plain Gaussians by GDP ---


def delta_of_one(pair, epsilon):
    """δ(ε) of one release: P − e^ε·Q of the half-line where the loss exceeds ε."""
    x = pair.x_of_loss(np.atleast_1d(epsilon))
    side = -1 if pair.direction is Direction.REMOVE else 1

    def mass(parts):
        return sum(w * ndtr(side * (x - c) / pair.z) for w, c in parts)

    return mass(pair._first) - np.exp(epsilon) * mass(pair._second)


def delta_of_two(pair, epsilon):
    """E_P[δ(ε − loss)], by the trapezoid rule on a grid far finer than the integrand's scale."""
    x = np.linspace(-1 - 12 * pair.z, 1 + 12 * pair.z, 40_001)
    density = sum(w * norm.pdf(x, c, pair.z) for w, c in pair._first)
    return float(np.dot(density, delta_of_one(pair, epsilon - pair.loss(x))) * (x[1] - x[0]))


def exact_epsilon(delta_at, pair, delta):
    return brentq(lambda e: float(np.squeeze(delta_at(pair, e))) - delta, 0.0, 60.0, xtol=1e-10)


PAIRS = [(0.3, 1.0), (0.05, 0.7), (0.9, 2.0), (0.01, 1.5)]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("q", "z"), PAIRS)
@pytest.mark.parametrize("delta", [1e-3, 1e-7])
def test_one_step_is_never_below_its_closed_form(direction, q, z, delta):
    pair = Pair(direction, z, q)
    if delta_of_one(pair, 0.0) <= delta:
        pytest.fail("this case says nothing")
    exact = exact_epsilon(delta_of_one, pair, delta)
    ours = pld.epsilon_one_way([Gaussians(z, q)], delta, direction)
    assert exact <= ours <= exact * 1.001


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(("q", "z"), PAIRS[:3])
def test_two_steps_are_never_below_their_integral(direction, q, z):
    exact = exact_epsilon(delta_of_two, Pair(direction, z, q), 1e-4)
    ours = pld.epsilon_one_way([Gaussians(z, q, 2)], 1e-4, direction)
    assert exact * (1 - 1e-7) <= ours <= exact * 1.001


def test_a_grid_that_rounds_down_is_caught(monkeypatch):
    honest = pld._discretise
    monkeypatch.setattr(pld, "_discretise", lambda *a: replace(grid := honest(*a), first=grid.first - 1))
    pair = Pair(Direction.REMOVE, 1.0, 0.3)
    assert pld.epsilon_one_way([Gaussians(1.0, 0.3, 2)], 1e-4, pair.direction) < exact_epsilon(
        delta_of_two, pair, 1e-4
    )


@pytest.mark.parametrize("adjacency", [ZO, AR, RO])
@pytest.mark.parametrize(("z", "count"), [(1, 1), (0.3, 1), (0.1, 10), (1, 100), (1000, 10), (50, 100_000)])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12])
def test_plain_gaussians_are_never_below_gdp(adjacency, z, count, delta):
    mu = (2 if adjacency is RO else 1) * math.sqrt(count) / z
    exact = gdp.epsilon_from_mu(mu, delta)
    ours = pld.epsilon([Gaussians(z, 1.0, count)], delta, adjacency)
    assert exact <= ours <= exact * 1.001


# --- invariants ---


def test_heterogeneous_plain_gaussians_compose_like_gdp():
    groups = [Gaussians(z) for z in (1.0, 2.0, 4.0, 0.8)]
    exact = gdp.epsilon_from_mu(gdp.compose([1, 2, 4, 0.8]), 1e-6)
    assert pld.epsilon(groups, 1e-6, ZO) == pytest.approx(exact, rel=5e-4)


def test_full_sampling_is_no_sampling():
    nearly, plain = [Gaussians(2.0, q, 30) for q in (1 - 1e-12, 1.0)]
    for adjacency in (ZO, RO):
        assert pld.epsilon([nearly], 1e-5, adjacency) == pytest.approx(
            pld.epsilon([plain], 1e-5, adjacency), rel=5e-4
        )


@pytest.mark.parametrize(("q", "z", "count"), [(0.1, 1.0, 100), (0.01, 4.0, 3000), (0.5, 0.8, 10)])
def test_order_of_accountants_and_adjacencies(q, z, count):
    group = [Gaussians(z, q, count)]
    tight, replaced = pld.epsilon(group, 1e-5, ZO), pld.epsilon(group, 1e-5, RO)
    halved = pld.epsilon([Gaussians(z / 2, q, count)], 1e-5, ZO)
    assert tight <= rdp.epsilon(q, z, count, 1e-5)
    assert tight < replaced < halved
    assert pld.epsilon(group, 1e-5, AR) == tight


def test_monotone_in_everything():
    base = pld.epsilon([Gaussians(1.5, 0.05, 200)], 1e-5, ZO)
    assert pld.epsilon([Gaussians(1.4, 0.05, 200)], 1e-5, ZO) > base
    assert pld.epsilon([Gaussians(1.5, 0.06, 200)], 1e-5, ZO) > base
    assert pld.epsilon([Gaussians(1.5, 0.05, 220)], 1e-5, ZO) > base
    assert pld.epsilon([Gaussians(1.5, 0.05, 200)], 1e-6, ZO) > base
    assert pld.epsilon([Gaussians(1.5, 0.05, 200), Gaussians(30.0)], 1e-5, ZO) > base


def test_a_mixture_of_groups_does_not_depend_on_how_it_is_written():
    together = pld.epsilon([Gaussians(2.0, 0.1, 50), Gaussians(9.0, 1.0, 4), Gaussians(1.0, 0.01, 9)], 1e-5, ZO)
    parts = [Gaussians(9.0, 1.0, 3), Gaussians(2.0, 0.1, 20), Gaussians(1.0, 0.01, 9)]
    apart = pld.epsilon([*parts, Gaussians(2.0, 0.1, 30), Gaussians(9.0)], 1e-5, ZO)
    assert together == pytest.approx(apart, rel=1e-9)


def test_finer_grids_only_lower_the_bound():
    group = [Gaussians(1.1, 256 / 6e4, 3000)]
    values = [pld.epsilon(group, 1e-6, ZO, accuracy=a) for a in (1e-2, 1e-3, 1e-4, 1e-5)]
    assert values == sorted(values, reverse=True)
    assert values[2] <= values[3] * 1.0003


def random_case(generator):
    return (
        10 ** generator.uniform(-4, 0),
        10 ** generator.uniform(math.log10(0.3), 3),
        int(10 ** generator.uniform(0, 5)),
        10 ** generator.uniform(-12, -1),
        list(Adjacency)[generator.integers(3)],
    )


def check_wide_range(seed, cases):
    """No failure and no loss of accuracy anywhere: a grid three times finer moves ε by little, and downwards."""
    generator = np.random.default_rng(seed)
    for _ in range(cases):
        q, z, count, delta, adjacency = case = random_case(generator)
        used = pld.epsilon([Gaussians(z, q, count)], delta, adjacency)
        finer = pld.epsilon([Gaussians(z, q, count)], delta, adjacency, accuracy=1e-5)
        assert finer <= used * (1 + 1e-4) + 1e-9, case
        assert used <= finer * 1.002 + 1e-6, case


def test_wide_range():
    check_wide_range(seed=11, cases=80)


@pytest.mark.soak
def test_wide_range_in_full():
    check_wide_range(seed=12, cases=2000)


def test_nothing_seen_costs_nothing():
    assert pld.epsilon([], 1e-5, ZO) == 0
    assert pld.epsilon([Gaussians(math.inf, 0.1, 5)], 1e-5, ZO) == 0
    assert pld.epsilon([Gaussians(100.0, 1e-4, 3)], 1e-5, ZO) == 0  # total variation is under δ


def test_bad_delta():
    with pytest.raises(UserError):
        pld.epsilon([Gaussians(1.0)], 0.0, ZO)


@pytest.mark.parametrize(("z", "delta"), [(0.05, 1e-300), (1.0, 1e-320), (0.02, 1e-5)])
def test_what_floats_cannot_hold_is_refused_in_one_line(z, delta):
    for ask in (lambda g: pld.epsilon(g, delta, ZO), lambda g: pld.epsilon_one_way(g, delta, Direction.REMOVE)):
        with pytest.raises(UserError, match="take a larger δ or more noise") as caught:
            ask([Gaussians(z, 0.1, 1)])
        assert "\n" not in str(caught.value)


def test_a_moment_that_is_no_number_never_counts_as_nothing(monkeypatch):
    """max(0, nan) is 0: without the check (the mutant) an unknown cost would be none at all."""
    monkeypatch.setattr(pld, "_bound_one_way", lambda *_: math.nan)
    assert max(0.0, math.nan) == 0.0
    with pytest.raises(UserError, match="no ε can be computed"):
        pld.epsilon([Gaussians(1.0, 0.1, 10)], 1e-5, ZO)
