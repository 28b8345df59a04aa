"""What a person with several records is promised by a record-level run (R18)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from run_folder import edit, make_run
from scipy.stats import binom

from modicum.errors import UserError
from modicum.privacy.accounting import gdp, pld
from modicum.privacy.accounting.gaussians import Gaussians
from modicum.privacy.accounting.groups import SIZES, group_epsilon, plan_groups
from modicum.privacy.accounting.pairs import Direction, Pair
from modicum.privacy.events import NoSampling, Poisson, Sampler, Shuffled
from modicum.privacy.fixed_shapes import Capacity
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit
from modicum.privacy.verify import verify
from modicum.privacy.views import KnownTo

DELTA = 1e-5


def plan(sampler: Sampler, *, z: float = 5.0, count: int = 20, **spec: object) -> PrivacyPlan:
    return PrivacyPlan(
        client="a",
        spec=PrivacySpec(**{"unit": Unit.RECORD, "delta": DELTA, **spec}),  # type: ignore[arg-type]
        budget=1e6,
        releases=(PlannedRelease("gradient", z, sampler, count),),
    )


@pytest.mark.parametrize("sampler", [NoSampling(), Shuffled(4)])
@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
def test_without_hidden_coins_a_group_is_one_gaussian(sampler: Sampler, adjacency: Adjacency) -> None:
    moved = adjacency.moves * math.sqrt(20) / 5
    for size in SIZES:
        found = group_epsilon(plan(sampler, adjacency=adjacency), size)
        assert found == pytest.approx(gdp.epsilon_from_mu(size * moved, DELTA))


def test_a_multiple_of_epsilon_would_not_hold() -> None:
    """The negative control: k·ε at the same δ is less than what k records can be told by."""
    one = plan(NoSampling(), z=50.0)
    single = gdp.epsilon_from_mu(math.sqrt(20) / 50, DELTA)
    assert all((group_epsilon(one, size) or 0) > size * single for size in SIZES)


def peer(q: float, z: float, count: int, size: int, *, pessimistic: bool) -> float:
    losses = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    drawn = list(range(size + 1))
    single = losses.from_mixture_gaussian_mechanism(
        z,
        drawn,
        [float(w) for w in binom.pmf(drawn, size, q)],
        pessimistic_estimate=pessimistic,
        value_discretization_interval=2e-3,
    )
    return float(single.self_compose(count).get_epsilon_for_delta(DELTA))


@pytest.mark.parametrize(
    ("q", "z", "count", "size"), [(0.1, 5.0, 30, 2), (0.02, 4.0, 100, 10), (0.5, 20.0, 10, 5)]
)
def test_sampled_groups_agree_with_another_library(q: float, z: float, count: int, size: int) -> None:
    found = group_epsilon(plan(Poisson(q, KnownTo.CLIENT), z=z, count=count), size) or 0.0
    low, high = (peer(q, z, count, size, pessimistic=side) for side in (False, True))
    assert low <= found <= max(1.01 * high, high + 2e-3)
    # Negative control: the price of one record is not that of several.
    alone = pld.epsilon([Gaussians(z, q, count)], DELTA, Adjacency.ZERO_OUT)
    assert alone < low


@pytest.mark.parametrize("direction", [Direction.REMOVE, Direction.ADD])
@pytest.mark.parametrize("q", [1e-4, 0.1, 0.9])
def test_a_groups_loss_is_inverted(direction: Direction, q: float) -> None:
    pair = Pair(direction, 2.0, q, 7)
    low, high = pair.loss_range(1e-12)
    losses = low + (high - low) * pld.np.linspace(1e-3, 1 - 1e-3, 501)
    assert pld.np.allclose(pair.loss(pair.x_of_loss(losses)), losses, rtol=1e-11, atol=1e-13)


def test_a_group_of_one_is_one_record() -> None:
    one = [Gaussians(5.0, 0.1, 100), Gaussians(8.0, 1.0, 2)]
    alone = pld.epsilon(one, DELTA, Adjacency.ZERO_OUT)
    assert pld.group_epsilon(one, DELTA, Adjacency.ZERO_OUT, 1) == pytest.approx(alone, rel=3e-3)


def test_a_capacity_has_less_room_for_several() -> None:
    tight = Poisson(0.1, KnownTo.CLIENT, Capacity(34, 100))
    free = Poisson(0.1, KnownTo.CLIENT)
    assert (group_epsilon(plan(tight), 5) or 0) > (group_epsilon(plan(free), 5) or 0)
    assert group_epsilon(plan(tight), 10) is None  # overflows more often than δ allows


def test_none_is_an_answer() -> None:
    sampled = Poisson(0.1, KnownTo.CLIENT)
    assert group_epsilon(plan(sampled, adjacency=Adjacency.REPLACE_ONE), 2) is None
    filtered = PrivacyPlan(
        client="a", spec=PrivacySpec(unit=Unit.RECORD), budget=1.0, guard=Guard.RDP_FILTER, order=8
    )
    assert plan_groups(filtered) == dict.fromkeys(SIZES)
    gaussian = replace(filtered, guard=Guard.GDP_FILTER, order=None)
    assert plan_groups(gaussian)[2] == pytest.approx(gdp.epsilon_from_mu(2 * 0.26805, DELTA), rel=1e-3)
    assert plan_groups(replace(gaussian, guard=Guard.NONE, budget=math.inf)) == {}
    assert plan_groups(replace(gaussian, spec=PrivacySpec(unit=Unit.CLIENT))) == {}


def test_a_changed_figure_is_found_and_a_missing_one_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    stated = json.loads((run / "certificate.json").read_text())["clients"]["training"]["groups"]
    assert list(stated) == ["2", "5", "10"]
    assert verify(run).matches
    edit(run, lambda c: c["clients"]["training"]["groups"].update({"5": 0.1}))
    assert any("a person with 5 records" in p for c in verify(run).clients for p in c.problems)
    edit(run, lambda c: c["clients"]["training"].pop("groups"))
    with pytest.raises(UserError, match=r"states ε for persons with \[\] records"):
        verify(run)
