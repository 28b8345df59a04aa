"""Guards: refuse before spending, report the cap, and never the unsound filter over several orders."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from modicum.errors import UserError
from modicum.privacy.accounting import gdp, rdp
from modicum.privacy.events import Block, NoSampling, Poisson, Release, Sampler, Shuffled
from modicum.privacy.ledger import budgets
from modicum.privacy.ledger.budgets import PlanGuard, Reason, check_plan, guard_for
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import KnownTo

ZERO_OUT = PrivacySpec(unit="record")
REPLACE = PrivacySpec(unit="record", adjacency="replace-one")
SECRET = Poisson(0.1, KnownTo.CLIENT)
UNSAMPLED = NoSampling()


def release(z: float, *, spec: PrivacySpec = ZERO_OUT, sampler: Sampler = UNSAMPLED, count: int = 1) -> Release:
    return Release(client="a", round=0, spec=spec, blocks=(Block("sum", 1.0, z),), sampler=sampler, count=count)


def gdp_plan(epsilon: float = 1.0, spec: PrivacySpec = ZERO_OUT) -> PrivacyPlan:
    return PrivacyPlan(client="a", spec=spec, budget=epsilon, guard=Guard.GDP_FILTER)


def rdp_plan(epsilon: float = 1.0, order: float = 17, spec: PrivacySpec = ZERO_OUT) -> PrivacyPlan:
    return PrivacyPlan(client="a", spec=spec, budget=epsilon, guard=Guard.RDP_FILTER, order=order)


def plan_of(*kinds: tuple[float, Sampler, int], budget: float = 100.0) -> PrivacyPlan:
    planned = tuple(PlannedRelease(f"kind {i}", z, sampler, count) for i, (z, sampler, count) in enumerate(kinds))
    return PrivacyPlan(client="a", spec=ZERO_OUT, budget=budget, releases=planned)


def reason(guard: budgets.BudgetGuard, one: Release) -> Reason | None:
    refusal = guard.refusal(one)
    return None if refusal is None else refusal.reason


def test_a_plan_allows_exactly_its_counts() -> None:
    guard: budgets.BudgetGuard = guard_for(plan_of((5.0, NoSampling(), 3), (2.0, SECRET, 10)))
    for _ in range(3):
        guard = guard.charge(release(5.0))
    assert reason(guard, release(5.0)) is Reason.PLAN_EXHAUSTED
    guard = guard.charge(release(2.0, sampler=SECRET, count=9))
    assert reason(guard, release(2.0, sampler=SECRET, count=2)) is Reason.PLAN_EXHAUSTED
    assert reason(guard, release(2.0, sampler=SECRET)) is None


def test_a_plan_refuses_what_it_does_not_list() -> None:
    guard = guard_for(plan_of((5.0, NoSampling(), 3)))
    assert reason(guard, release(4.999)) is Reason.NOT_PLANNED
    assert reason(guard, release(5.0, sampler=SECRET)) is Reason.NOT_PLANNED
    assert reason(guard, release(5.0, sampler=Shuffled())) is Reason.NOT_PLANNED
    assert reason(guard, release(5.0, spec=REPLACE)) is Reason.SPEC_DIFFERS
    assert reason(guard, release(5.0, spec=replace(ZERO_OUT, delta=1e-3))) is Reason.SPEC_DIFFERS


def test_more_noise_than_planned_takes_the_cheapest_fitting_kind() -> None:
    guard = guard_for(plan_of((5.0, NoSampling(), 1), (8.0, NoSampling(), 1)))
    assert isinstance(guard, PlanGuard)
    assert guard.charge(release(9.0)).left == (1, 0)
    assert guard.charge(release(9.0)).charge(release(9.0)).left == (0, 0)
    assert guard.charge(release(7.0)).left == (0, 1)


def test_a_plan_beyond_its_budget_is_refused_before_the_run() -> None:
    plan = plan_of((1.0, NoSampling(), 1), budget=4.38)
    check_plan(plan)
    assert guard_for(plan).reported() == pytest.approx(4.3772, abs=1e-3)
    with pytest.raises(UserError, match="more than the budget"):
        check_plan(replace(plan, budget=4.37))


def test_gdp_filter_is_lossless_and_reports_its_cap() -> None:
    """Heterogeneous noise fills μ² exactly; then the next release, however small, is refused."""
    mu = gdp.mu_from_epsilon(1.0, 1e-5)
    guard: budgets.BudgetGuard = guard_for(gdp_plan())
    guard = guard.charge(release(math.sqrt(2) / mu)).charge(release(2 / mu))
    last = release(2 / mu * (1 + 1e-9))
    assert reason(guard, last) is None
    guard = guard.charge(last)
    assert reason(guard, release(100 / mu)) is Reason.BUDGET_EXCEEDED
    assert guard.reported() == 1.0


def test_rdp_filter_stops_at_the_cap_of_its_order() -> None:
    """q=128/1200, z=13.69: at α*=17 a cap of ε=1.093 allows the 1172 steps, and hardly one more percent (R2)."""
    sampler = Poisson(128 / 1200, KnownTo.CLIENT)
    guard: budgets.BudgetGuard = guard_for(rdp_plan(1.0935))
    guard = guard.charge(release(13.69, sampler=sampler, count=1172))
    assert reason(guard, release(13.69, sampler=sampler, count=12)) is Reason.BUDGET_EXCEEDED
    assert guard.reported() == 1.0935


def test_replace_one_is_charged_at_half_the_multiplier() -> None:
    for plan, sampler in ((gdp_plan(spec=REPLACE), NoSampling()), (rdp_plan(spec=REPLACE), SECRET)):
        half = budgets.filter_cost(replace(plan, spec=ZERO_OUT), release(5.0, sampler=sampler))
        assert budgets.filter_cost(plan, release(10.0, spec=REPLACE, sampler=sampler)) == half


def test_only_hidden_coins_amplify() -> None:
    plan = rdp_plan()
    seen = Poisson(0.1, KnownTo.SERVER)
    assert budgets.filter_cost(plan, release(5.0, sampler=seen)) == rdp.rdp_gaussian(5.0, 17)
    assert budgets.filter_cost(plan, release(5.0, sampler=SECRET)) == rdp.rdp_sampled_gaussian(0.1, 5.0, 17)
    assert budgets.filter_cost(gdp_plan(), release(5.0, sampler=SECRET)) == pytest.approx(1 / 25)


def test_shuffled_passes_have_no_charge_under_add_remove() -> None:
    spec = PrivacySpec(unit="record", adjacency="add-remove")
    guard = guard_for(gdp_plan(spec=spec))
    assert reason(guard, release(100.0, spec=spec, sampler=Shuffled())) is Reason.NO_SOUND_CHARGE


@pytest.mark.parametrize("z", [0.0, 1e-300])
def test_a_release_in_the_clear_is_refused(z: float) -> None:
    for plan in (gdp_plan(), rdp_plan()):
        for sampler in (UNSAMPLED, SECRET):
            assert reason(guard_for(plan), release(z, sampler=sampler)) is Reason.BUDGET_EXCEEDED
    assert reason(guard_for(plan_of((5.0, UNSAMPLED, 3))), release(z)) is Reason.NOT_PLANNED


def test_an_order_with_no_budget_is_refused() -> None:
    with pytest.raises(UserError, match="larger order"):
        guard_for(rdp_plan(0.1, order=2))


def test_no_guard_claims_nothing() -> None:
    guard = guard_for(PrivacyPlan(client="a", spec=ZERO_OUT, budget=math.inf, guard=Guard.NONE))
    assert reason(guard, release(1e-6)) is None
    assert guard.reported() == math.inf
