"""PAC-DP and the methods it is compared with: sound modes keep budgets, faithful ones show what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.methods import NbAfl, PacDp, RpdpFl
from modicum.papers.pac_dp.accounting import pac_dp_noise
from modicum.papers.pac_dp.curve import Curve
from modicum.papers.pac_dp.sampled_by_budget import SampledByBudget
from modicum.privacy.accounting import epsilon
from modicum.privacy.events import NoSampling, Poisson

SETTING = Setting(clients=3, per_round=3, rounds=10)


def facts(budget: float, records: int = 200, name: str = "c") -> ClientFacts:
    return ClientFacts(name, records, budget, 10)


def test_bounds_are_curve_times_schedule(tmp_path: Path) -> None:
    Curve((0.1, 10.0), (0.5, 1.5)).write(tmp_path / "f.json")
    policy = PacDp(curve=str(tmp_path / "f.json")).build(SETTING).policy
    clients = tuple(facts(b, name=n) for n, b in (("a", 0.1), ("b", 1.0), ("c", 10.0)))
    state = policy.init(PublicFacts(clients, 10, 5, {}))
    start, end = (policy.decide(state, t, ["a", "b", "c"]) for t in (0, 9))
    assert [start[n].bound for n in "abc"] == pytest.approx([0.5, 1.0, 1.5])
    assert 0.1 <= end["a"].bound / start["a"].bound < 0.4


def test_faithful_claims_less_than_it_costs() -> None:
    mechanism = PacDp(mode="faithful", published="mnist", epochs=5).build(SETTING).mechanism
    plan = mechanism.plan(facts(1.0), ())
    assert plan.releases[0].noise_multiplier == pac_dp_noise(1.0, 10, 1e-5)
    true = epsilon(list(plan.releases), plan.spec).epsilon
    assert 3 < true <= plan.budget < 3 * true


def test_faithful_takes_the_fitted_quadratic_as_it_is(tmp_path: Path) -> None:
    """F(2) = −4 + 8 + 1 = 5 and F(3) = −9 + 12 + 1 = 4: it falls, and at 5 it is no bound."""
    about = {"pairs": [[1.0, 4.0], [2.0, 5.0], [3.0, 4.0]]}  # on −ε² + 4ε + 1
    Curve((0.1, 10.0), (0.5, 1.5), about=about).write(tmp_path / "f.json")
    method = PacDp(mode="faithful", curve=str(tmp_path / "f.json")).build(SETTING)
    clients = tuple(facts(b, name=n) for n, b in (("a", 2.0), ("b", 3.0)))
    state = method.policy.init(PublicFacts(clients, 10, 5, {}))
    decided = method.policy.decide(state, 0, ["a", "b"])
    assert [decided[n].bound for n in "ab"] == pytest.approx([5.0, 4.0])
    assert str(tmp_path) in method.notes[0]
    with pytest.raises(UserError, match="no bound"):
        method.policy.init(PublicFacts((facts(5.0),), 10, 5, {}))


def test_faithful_guesses_no_dataset(tmp_path: Path) -> None:
    Curve((0.1, 10.0), (0.5, 1.5)).write(tmp_path / "old.json")
    for settings, line in (
        ({}, "needs one quadratic"),
        ({"published": "mnist", "curve": str(tmp_path / "old.json")}, "needs one quadratic"),
        ({"curve": str(tmp_path / "old.json")}, "holds no pairs"),
        ({"published": "svhn"}, "mnist or cifar-10"),
    ):
        with pytest.raises(UserError, match=line):
            PacDp(mode="faithful", **settings).build(SETTING)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="faithful mode"):
        PacDp(published="mnist").build(SETTING)


def test_sound_keeps_what_was_granted() -> None:
    for method in (PacDp(), NbAfl(), RpdpFl()):
        plan = method.build(SETTING).mechanism.plan(facts(0.7), ())
        assert epsilon(list(plan.releases), plan.spec).epsilon <= 0.7 == plan.budget


def test_rpdp_draws_strict_budgets_less_often() -> None:
    mechanism = RpdpFl(full_budget=2.0).build(SETTING).mechanism
    assert isinstance(mechanism, SampledByBudget)
    rates = [mechanism.sampler(facts(b)) for b in (0.2, 0.8, 2.0)]
    assert isinstance(rates[0], Poisson)
    assert isinstance(rates[1], Poisson)
    assert 0 < rates[0].rate < rates[1].rate < 1
    assert isinstance(rates[2], NoSampling)
    noises = [mechanism.plan(facts(b), ()).releases[0].noise_multiplier for b in (0.2, 0.8, 2.0)]
    assert max(noises) == pytest.approx(min(noises), rel=0.01)


def test_rpdp_as_published_is_certified_at_what_its_curve_gives() -> None:
    """Rényi accounting is not tight, and a curve is off on either side: the plan holds the ε that follows."""
    mechanism = RpdpFl(full_budget=2.0, mode="faithful").build(SETTING).mechanism
    plans = {b: mechanism.plan(facts(b), ()) for b in (0.2, 0.8, 2.0)}
    true = {b: epsilon(list(p.releases), p.spec).epsilon for b, p in plans.items()}
    assert true[0.2] < true[0.8] < true[2.0] < 2.0
    for budget, plan in plans.items():
        assert true[budget] <= plan.budget == pytest.approx(true[budget], rel=1e-5)
        assert true[budget] == pytest.approx(budget, rel=0.2)
    assert len({p.releases[0].noise_multiplier for p in plans.values()}) == 1


def test_rpdp_refuses_a_batch_of_its_own() -> None:
    with pytest.raises(UserError, match="set steps"):
        SampledByBudget(batch=3, steps=1)


def test_nbafl_claims_a_sensitivity_that_shrinks_with_the_records() -> None:
    mechanism = NbAfl(mode="faithful").build(SETTING).mechanism
    true = [
        epsilon(list(p.releases), p.spec).epsilon for p in (mechanism.plan(facts(1.0, n), ()) for n in (50, 5000))
    ]
    assert 1 < true[0] < true[1]


def test_nbafl_adds_noise_on_the_way_down_where_its_theorem_says() -> None:
    import torch

    few = tuple(ClientFacts(f"c{i}", 100, 1.0, 1) for i in range(3))
    aggregation = NbAfl(mode="faithful").build(Setting(3, 1, 10)).aggregation
    state = aggregation.init(PublicFacts(few, 10, 4, {}))
    assert state["std"] > 0
    released = (Released("c0", 0, torch.zeros(4), {}, NoiseFacts(1.0, 1.0, {})),)
    moved, state = aggregation.combine(state, torch.zeros(4), released)
    assert moved.norm() > 0
    assert state["round"] == 1
    often = tuple(ClientFacts(f"c{i}", 100, 1.0, 10) for i in range(3))
    assert aggregation.init(PublicFacts(often, 10, 4, {}))["std"] == 0
