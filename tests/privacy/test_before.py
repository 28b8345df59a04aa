"""What an earlier look cost stays within the plan's budget, and is never released a second time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from modicum.privacy.accounting import gdp
from modicum.privacy.accounting.filters import filter_cap, plan_guarantee
from modicum.privacy.events import Block, NoSampling, Release
from modicum.privacy.ledger.budgets import guard_for
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.second_opinion import filter_epsilon, plan_epsilon
from modicum.privacy.spec import PrivacySpec, Unit

SPEC = PrivacySpec(unit=Unit.RECORD)
LOOK = PlannedRelease("look:first", 20.0, NoSampling(), 1)
STEPS = PlannedRelease("gradient", 25.0, NoSampling(), 30)
PLAN = PrivacyPlan(client="a", spec=SPEC, budget=2.0, releases=(STEPS,), before=(LOOK,))


def release(z: float) -> Release:
    return Release(client="a", round=0, spec=SPEC, blocks=(Block("gradient", 1.0, z),), sampler=NoSampling())


def test_both_together_are_one_gaussian() -> None:
    mu = math.sqrt(30 / 25.0**2 + 1 / 20.0**2)
    exact = gdp.epsilon_from_mu(mu, SPEC.delta)
    assert plan_guarantee(PLAN).epsilon == pytest.approx(exact, rel=1e-12)
    assert plan_epsilon(PLAN, exact) == pytest.approx(exact, rel=0.01)
    assert exact > plan_guarantee(replace(PLAN, before=())).epsilon


def test_a_training_cannot_release_what_the_look_has_used_up() -> None:
    assert guard_for(PLAN).refusal(release(20.0)) is not None
    forgetful = replace(PLAN, releases=(STEPS, LOOK), before=())  # the look among what may still be released
    assert guard_for(forgetful).refusal(release(20.0)) is None


@pytest.mark.parametrize(("guard", "order"), [(Guard.GDP_FILTER, None), (Guard.RDP_FILTER, 8.0)])
def test_a_filter_lets_through_what_the_look_left(guard: Guard, order: float | None) -> None:
    whole = PrivacyPlan(client="a", spec=SPEC, budget=2.0, guard=guard, order=order)
    plan = replace(whole, before=(LOOK,))
    assert filter_cap(plan) < filter_cap(whole)
    spent, most = guard_for(plan), {(LOOK.noise_multiplier, LOOK.sampler): 1}
    while spent.refusal(release(5.0)) is None:
        spent = spent.charge(release(5.0))
        most[5.0, NoSampling()] = most.get((5.0, NoSampling()), 0) + 1
    assert 1.5 < filter_epsilon(plan, most) <= 2.0 * (1 + 1e-3)
    most[5.0, NoSampling()] += 2  # as a filter that forgot the look would let through
    assert filter_epsilon(plan, most) > 2.0


def test_a_plan_without_a_look_is_written_as_before() -> None:
    assert PrivacyPlan.from_dict(PLAN.to_dict()) == PLAN
    assert "before" not in replace(PLAN, before=()).to_dict()
