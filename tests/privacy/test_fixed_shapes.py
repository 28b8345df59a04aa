"""Lanes and capacities: rows, laws, and the charge of an overflow, exactly on small cases (R16)."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom, norm

from modicum.errors import UnsoundError, UserError
from modicum.privacy import second_opinion
from modicum.privacy.accounting.calibration import calibrate_noise, largest_steps
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.events import Block, Poisson, Release, sampler_from_dict
from modicum.privacy.fixed_shapes import BLANK, Capacity, Lanes, smallest_capacity
from modicum.privacy.ledger.budgets import Reason, guard_for
from modicum.privacy.lifetime import Filter, Lifetime
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit
from modicum.privacy.views import KnownTo

SPEC = PrivacySpec(unit=Unit.RECORD)
ROWS_OVER_DRAWN = {  # 20,000 records, from the specification: lanes of 4, 8, 16, 32, and a capacity at 2⁻⁵⁰
    16: (1.53, 2.09, 3.07, 4.74, 3.56),
    64: (1.26, 1.53, 1.98, 2.73, 2.14),
    128: (1.19, 1.36, 1.68, 2.15, 1.77),
    256: (1.13, 1.26, 1.46, 1.78, 1.53),
    1024: (1.06, 1.13, 1.22, 1.37, 1.25),
}


def no_numbers(size: int) -> NDArray[np.float64]:
    raise AssertionError(f"lanes draw nothing, and {size} numbers were asked for")


@pytest.mark.parametrize("batch", ROWS_OVER_DRAWN)
def test_rows_computed_over_rows_drawn(batch: int) -> None:
    n, rate = 20_000, batch / 20_000
    found = [c * Lanes(c).expected_passes(n, rate) / batch for c in (4, 8, 16, 32)]
    found.append(smallest_capacity(n, rate, 2.0**-50).rows / batch)
    assert found == pytest.approx(ROWS_OVER_DRAWN[batch], rel=0.02)


def test_expected_passes_are_the_mean_of_drawn_ones() -> None:
    rng, shape, n, rate = np.random.default_rng(1), Lanes(4), 21, 0.3
    steps = [len(shape.laid_out(np.flatnonzero(rng.random(n) < rate), n, no_numbers)) for _ in range(4000)]
    assert np.mean(steps) == pytest.approx(shape.expected_passes(n, rate), abs=5 * np.std(steps) / math.sqrt(4000))


@pytest.mark.parametrize("n", [1, 3, 8, 9])
def test_lanes_hold_every_drawn_record_once_in_its_own_row(n: int) -> None:
    for drawn in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(n + 1)):
        rows = Lanes(4).laid_out(np.array(drawn, np.int64), n, no_numbers)
        held = [(int(i), lane) for passed in rows for lane, i in enumerate(passed) if i != BLANK]
        assert sorted(i for i, _ in held) == list(drawn)
        assert all(lane == i % 4 for i, lane in held)
        assert len(rows) == max(Counter(i % 4 for i in drawn).values(), default=0)


def all_orders(items: int) -> list[NDArray[np.float64]]:
    """Every order of so many uniform numbers, once: exact where a law depends on their order alone."""
    return [
        np.concatenate([np.array(order) / items, np.zeros(items)])
        for order in itertools.permutations(range(items))
    ]


def test_a_capacity_s_rows_have_one_law_with_and_without_a_record() -> None:
    """Exact: two rows, three records; each order of the drawn numbers once."""
    shape, n, j = Capacity(2, 3), 3, 0
    orders = all_orders(5)
    for others in ([], [1], [2]):
        laws = []
        for drawn in (others, sorted([*others, j])):
            rows = [shape.laid_out(np.array(drawn, np.int64), n, lambda _, o=o: o)[0] for o in orders]
            laws.append(Counter(tuple(int((r == k).argmax()) for k in others) for r in rows))
            assert all({*r.tolist()} - {BLANK} == {*drawn} for r in rows)
        assert laws[0] == laws[1]
        assert len({*laws[0].values()}) == 1  # uniform


def test_an_overflow_keeps_a_random_few() -> None:
    rows = [Capacity(2, 3).laid_out(np.arange(3), 3, lambda _, o=o: o)[0] for o in all_orders(5)]
    kept = Counter(frozenset(r.tolist()) for r in rows)
    assert len(kept) == 3
    assert len({*kept.values()}) == 1


def exact_delta(shape: Capacity | None, n: int, rate: float, z: float, eps: float) -> float:
    """δ(ε) of one release, the worse direction: others add +1 each; record j adds −1 if it is drawn and kept, and
    in the other world it is blank, which is never drawn. Mixtures of normals, integrated on a fine grid."""
    rows = n if shape is None else shape.rows
    x = np.linspace(-n - 14 * z, n + 14 * z, 400_001)

    def density(coin: float) -> NDArray[np.float64]:
        total = np.zeros_like(x)
        for k in range(n):  # drawn others
            kept = min(1.0, rows / (k + 1))  # j's chance to be kept, if it is drawn
            means = {min(k, rows): 1 - coin, min(k, rows - 1) - 1: coin * kept, rows: coin * (1 - kept)}
            for mean, share in means.items():
                total += binom.pmf(k, n - 1, rate) * share * norm.pdf(x, mean, z)
        return total

    worlds = density(rate), density(0.0)
    excess = [np.maximum(a - math.exp(eps) * b, 0).sum() for a, b in (worlds, worlds[::-1])]
    return float(max(excess) * (x[1] - x[0]))


@pytest.mark.parametrize("eps", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("z", [0.5, 1.0])
def test_an_overflow_costs_at_most_its_probability(z: float, eps: float) -> None:
    n, rate, shape = 6, 0.3, Capacity(2, 6)
    p = shape.overflow(rate)
    assert p == pytest.approx(sum(binom.pmf(k, 5, rate) for k in range(2, 6)))
    charged = exact_delta(None, n, rate, z, eps) + p
    assert exact_delta(shape, n, rate, z, eps) <= charged


def test_without_its_charge_a_capacity_would_be_believed_too_cheap() -> None:
    """The negative control: where j stands in somebody's way, the sum moves by two bounds and not by one."""
    assert exact_delta(Capacity(2, 6), 6, 0.3, 0.5, 2.0) > 1.05 * exact_delta(None, 6, 0.3, 0.5, 2.0)


def planned(shape: Lanes | Capacity | None, count: int = 200, z: float = 1.0) -> PlannedRelease:
    return PlannedRelease("gradient", z, Poisson(0.1, KnownTo.CLIENT, shape), count)


def test_lanes_cost_nothing() -> None:
    assert epsilon([planned(Lanes(16))], SPEC).epsilon == epsilon([planned(None)], SPEC).epsilon


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_a_capacity_is_priced_at_what_its_overflow_leaves_of_delta(adjacency: Adjacency) -> None:
    spec, shape = PrivacySpec(unit=Unit.RECORD, adjacency=adjacency), Capacity(48, 200)
    taken = 200 * Poisson(0.1, KnownTo.CLIENT, shape).overflow
    assert 1e-9 < taken < 9e-6  # it matters
    rest = PrivacySpec(unit=Unit.RECORD, adjacency=adjacency, delta=spec.delta - taken)
    assert epsilon([planned(shape)], spec).epsilon == epsilon([planned(None)], rest).epsilon
    z = calibrate_noise(spec, 2.0, planned(shape).sampler, 200)
    assert epsilon([planned(shape, z=z)], spec).epsilon <= 2.0
    assert largest_steps(spec, 2.0, planned(shape).sampler, z) >= 200
    plan = PrivacyPlan(client="a", spec=spec, budget=9.0, releases=(planned(shape),))
    ours = epsilon([planned(shape)], spec).epsilon
    assert second_opinion.plan_epsilon(plan, ours) == pytest.approx(ours, rel=5e-3)


def test_a_capacity_that_overflows_too_often_is_refused() -> None:
    with pytest.raises(UnsoundError, match="overflows too often"):
        epsilon([planned(Capacity(25, 200))], SPEC)
    with pytest.raises(UserError, match="overflows too often"):
        calibrate_noise(SPEC, 1.0, planned(Capacity(25, 200)).sampler, 200)


def test_a_filter_takes_lanes_and_refuses_a_capacity() -> None:
    plan = PrivacyPlan(client="a", spec=SPEC, budget=4.0, guard=Guard.RDP_FILTER, order=8.0)

    def release(shape: Lanes | Capacity) -> Release:
        sampler = Poisson(0.01, KnownTo.CLIENT, shape)
        return Release(client="a", round=0, spec=SPEC, blocks=(Block("gradient", 1.0, 4.0),), sampler=sampler)

    guard = guard_for(plan)
    assert guard.refusal(release(Lanes(8))) is None
    refused = guard.refusal(release(Capacity(20, 500)))
    assert refused is not None
    assert refused.reason is Reason.NO_SOUND_CHARGE


def test_a_lifetime_account_pays_for_an_overflow_too() -> None:
    lifetime = Lifetime(
        unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, filter=Filter.RDP, budget=4.0, delta=1e-5, order=8.0
    )
    small = smallest_capacity(200, 0.1, 1e-18)

    def price(shape: Lanes | Capacity) -> float:
        return lifetime.price(PrivacyPlan(client="a", spec=SPEC, budget=9.0, releases=(planned(shape, z=4.0),)))

    assert price(Lanes(16)) < price(small) < price(Lanes(16)) * (1 + 1e-6)
    with pytest.raises(UserError, match="capacity too small"):
        price(Capacity(48, 200))


@pytest.mark.parametrize("shape", [None, Lanes(16), Capacity(57, 479)])
def test_a_sampler_survives_a_journal(shape: Lanes | Capacity | None) -> None:
    sampler = Poisson(0.1, KnownTo.CLIENT, shape)
    assert sampler_from_dict(sampler.to_dict()) == sampler
    assert ("shape" in sampler.to_dict()) == (shape is not None)  # ledgers without one keep their bytes


@pytest.mark.parametrize(
    "shape", [{"kind": "lanes", "rows": 0}, {"kind": "capacity", "rows": 5}, {"kind": "rooms"}, {}]
)
def test_a_shape_that_is_none_is_refused(shape: dict[str, object]) -> None:
    with pytest.raises(UserError):
        sampler_from_dict({"kind": "poisson", "rate": 0.1, "known_to": "client", "shape": shape})
