"""The ε of ACDP-pFSD's cells: stated for the paper's δ where its noise is used, for 1e-5 elsewhere."""

from __future__ import annotations

import pytest

from modicum.core.facts import ClientFacts
from modicum.core.setting import Setting
from modicum.methods import METHODS, method
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.plan import PrivacyPlan
from modicum_bench.acdp_pfsd.cells import BUDGET, Cell, Choice, spec_of

PAPER = Setting(clients=50, per_round=50, rounds=100)
SMALL = Setting(clients=4, per_round=4, rounds=10)
TIGHT = {0.8: 104.84, 1.0: 71.21, 1.3: 45.72, 1.5: 36.10, 2.1: 21.05}
PRIVATE = ("dp-pfsd", "aqc", "acdp-pfsd", "dp-fedsam")


def plan_of(cell: Cell, budget: float) -> PrivacyPlan:
    mechanism = spec_of(cell, Choice(), None).build(PAPER).mechanism
    return mechanism.plan(ClientFacts("a", 100, budget, PAPER.rounds), ())


@pytest.mark.parametrize("sigma", TIGHT)
@pytest.mark.parametrize("name", PRIVATE)
def test_the_papers_noise_has_the_papers_delta(name: str, sigma: float) -> None:
    plan = plan_of(Cell("emnist", name, sigma=sigma), BUDGET)
    assert plan.spec.delta == pytest.approx(50**-1.1, rel=1e-12)
    assert plan_guarantee(plan).epsilon == pytest.approx(TIGHT[sigma], abs=0.005)


def test_a_budget_is_met_at_a_delta_one_may_promise() -> None:
    plan = plan_of(Cell("emnist", "dp-pfsd", model="components", epsilon=8.0), 8.0)
    assert plan.spec.delta == 1e-5
    assert 7.99 < plan_guarantee(plan).epsilon <= 8.0


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_delta_is_1e_5_unless_one_says_otherwise(name: str) -> None:
    assert method(name).build(SMALL).mechanism.spec.delta == 1e-5


def test_only_faithful_mode_takes_the_papers_delta_by_itself() -> None:
    faithful = method("acdp-pfsd", mode="faithful", noise_multiplier=1.0).build(SMALL)
    asked = method("acdp-pfsd", delta=None).build(SMALL)
    for made in (faithful, asked):
        assert made.mechanism.spec.delta == pytest.approx(4**-1.1, rel=1e-12)
