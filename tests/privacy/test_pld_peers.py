"""Our PLD against dp-accounting's and against Opacus' PRV accountant, on random releases."""

import math
from functools import cache, partial

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution

from modicum.privacy.accounting import pld, rdp
from modicum.privacy.accounting.gaussians import Gaussians
from modicum.privacy.accounting.pairs import Direction
from modicum.privacy.spec import Adjacency


def peer(q, z, count, delta, adjacency, interval, pessimistic):
    relation = (
        NeighboringRelation.REPLACE_ONE
        if adjacency is Adjacency.REPLACE_ONE
        else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    loss = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        sampling_prob=q,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,  # the library has no optimistic connect-the-dots
        value_discretization_interval=interval,
        neighboring_relation=relation,
    )
    return loss.self_compose(count).get_epsilon_for_delta(delta)


def ours(q, z, count, delta, adjacency):
    return pld.epsilon([Gaussians(z, q, count)], delta, adjacency)


def cases(seed, number):
    generator = np.random.default_rng(seed)
    for _ in range(number):
        yield (
            10 ** generator.uniform(-3, -0.3),
            10 ** generator.uniform(-0.3, 1),
            int(10 ** generator.uniform(0, 3.5)),
            10 ** generator.uniform(-9, -3),
            list(Adjacency)[generator.integers(3)],
        )


@cache
def peers(case):
    """The library's certified lower estimate and its PLD value."""
    # Wide enough to be quick, narrow enough that the peer is within 0.1% of its own limit.
    interval = min(1e-2, max(1e-5, ours(*case) / (300 * math.sqrt(case[2]))))
    return tuple(peer(*case, interval, pessimistic) for pessimistic in (False, True))


def outside(accountant, seed, number):
    """The cases in which an accountant is under the certified lower estimate or 1% over the PLD value."""
    found = []
    for case in cases(seed, number):
        value, (low, high) = accountant(*case), peers(case)
        if not low <= value <= 1.01 * high:
            found.append((case, low, value, high))
    return found


def test_within_the_peers_bounds():
    assert outside(ours, seed=1, number=25) == []


@pytest.mark.soak
def test_within_the_peers_bounds_in_full():
    assert outside(ours, seed=2, number=400) == []


def replace_one_as_add_remove(q, z, count, delta, _adjacency):
    return ours(q, z, count, delta, Adjacency.ADD_REMOVE)


def replace_one_at_half_noise(q, z, count, delta, adjacency):
    if adjacency is Adjacency.REPLACE_ONE:
        return ours(q, z / 2, count, delta, Adjacency.ADD_REMOVE)
    return ours(q, z, count, delta, adjacency)


def one_direction(direction, q, z, count, delta, adjacency):
    way = Direction.REPLACE if adjacency is Adjacency.REPLACE_ONE else direction
    return pld.epsilon_one_way([Gaussians(z, q, count)], delta, way)


def small_rate_rdp(q, z, count, delta, adjacency):
    """q²α/(2σ²) as if it were a bound."""
    factor = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    return min(rdp.epsilon_from_rdp(count * q**2 * a * factor**2 / (2 * z**2), a, delta) for a in rdp.ORDERS)


@pytest.mark.parametrize(
    "broken",
    [
        replace_one_as_add_remove,
        replace_one_at_half_noise,
        partial(one_direction, Direction.ADD),
        small_rate_rdp,
    ],
)
def test_broken_twins_are_caught(broken):
    assert outside(broken, seed=1, number=12)


PRV = [  # the table of oracles: q, z, K, PRV at δ=1e-5
    (1.0, 1.0, 1, 4.387),
    (0.01, 4.0, 10_000, 0.957),
    (256 / 6e4, 1.1, 14_063, 2.392),
    (0.1, 1.0, 100, 7.057),
    (0.0128, 1.0, 7_900, 7.232),
]


@pytest.mark.parametrize(("q", "z", "count", "expected"), PRV)
def test_opacus_prv_agrees(q, z, count, expected):
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(z, q, count)]
    upper = accountant.get_epsilon(1e-5, eps_error=0.01)
    assert upper == pytest.approx(expected, abs=2e-3)
    value = ours(q, z, count, 1e-5, Adjacency.ADD_REMOVE)
    assert upper - 0.02 <= value * 1.0005
    assert value <= upper * 1.0005
