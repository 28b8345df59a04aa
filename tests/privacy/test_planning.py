"""Several runs on one grant, planned: as an account would draw them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modicum.cli.app import app
from modicum.privacy.accounting import gdp
from modicum.privacy.events import KnownTo, NoSampling, Poisson
from modicum.privacy.lifetime import DrawRefused, Filter
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.planning import largest, lifetime_for, steps
from modicum.privacy.lifetime.spending import Identity, by_id
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit

DELTA = 1e-5


def planned(epsilon: float, *, rate: float = 1.0, unit: Unit = Unit.RECORD) -> PrivacyPlan:
    """Four plain Gaussians of this ε together, drawn at a rate."""
    z = 2.0 / gdp.mu_from_epsilon(epsilon, DELTA)
    sampler = NoSampling() if rate == 1 else Poisson(rate, KnownTo.CLIENT)
    release = PlannedRelease("gradient", z, sampler, 4)
    spec = PrivacySpec(unit=unit, delta=DELTA)
    return PrivacyPlan(client="a", spec=spec, budget=epsilon, guard=Guard.PLAN, releases=(release,))


def test_the_largest_next_run_fits_and_a_larger_one_does_not() -> None:
    lifetime = lifetime_for(4.0, DELTA, [planned(2.0)])
    (first,) = steps(lifetime, 0.0, [("a", planned(2.0))])
    assert lifetime.filter is Filter.GDP
    assert first.epsilon == pytest.approx(2.0, rel=1e-6)
    spent = lifetime.price(planned(2.0))
    fits = [steps(lifetime, spent, [("b", planned(first.next * k))])[0].fits for k in (0.999, 1.001)]
    assert fits == [True, False]
    assert 4.0 - first.epsilon < first.next < 4.0  # squares of μ add up, and ε does not


def test_a_plan_says_what_an_account_will_do(tmp_path: Path) -> None:
    """Run after run, drawn and planned."""
    runs = [(f"r{i}", planned(2.0)) for i in range(5)]
    lifetime = lifetime_for(4.0, DELTA, [p for _, p in runs])
    ahead = steps(lifetime, 0.0, runs)
    with DatasetAccount.start(tmp_path / "account", lifetime, Identity.ID, "id") as account:
        table = by_id(account.secret(), ["x", "y"])
        for step, (name, plan) in zip(ahead, runs, strict=True):
            try:
                account.hold(name, "terms", plan, table, tmp_path / "ledger.sqlite")
                account.draw(name)
                drawn = True
            except DrawRefused:
                drawn = False
            assert drawn == step.fits
            assert account.left(table) == pytest.approx(step.left)
            assert account.next_run(table) == pytest.approx(step.next)
    assert [step.fits for step in ahead] == [True, True, True, False, False]


def test_sampled_runs_are_planned_at_one_order() -> None:
    plan = planned(0.5, rate=0.05)
    lifetime = lifetime_for(2.0, DELTA, [plan])
    assert lifetime.order is not None
    (step,) = steps(lifetime, 0.0, [("a", plan)])
    cost = lifetime.price(planned(step.next * 0.999))
    assert cost <= lifetime.cap - lifetime.price(plan)  # a plain run of that size fits beside it
    assert lifetime.price(planned(step.next * 1.01)) > lifetime.cap - lifetime.price(plan)


def test_nothing_left_is_no_next_run() -> None:
    lifetime = lifetime_for(2.0, DELTA, [planned(2.0)])
    assert largest(lifetime, lifetime.cap) == 0.0
    assert not steps(lifetime, lifetime.cap, [("a", planned(0.1))])[0].fits


def test_units_of_runs_and_accounts() -> None:
    """An account of persons pays for no run of single records; one of records pays twice the shift for persons."""
    of_persons = lifetime_for(4.0, DELTA, [planned(1.0, unit=Unit.PERSON)])
    assert of_persons.unit is Unit.PERSON
    with pytest.raises(DrawRefused, match="protects persons and this run single records"):
        of_persons.price(planned(1.0))
    of_records = lifetime_for(4.0, DELTA, [planned(1.0)])
    assert of_records.price(planned(1.0, unit=Unit.PERSON)) == pytest.approx(4 * of_records.price(planned(1.0)))
    assert of_persons.adjacency is Adjacency.ZERO_OUT


def test_the_page(tmp_path: Path) -> None:
    data, method = '[data]\nname = "digits"\nclients = 2\n', '[method]\nname = "dp-sgd"\n'
    text = data + method + "[run]\nrounds = 2\n[privacy]\nbudgets = {}\n"
    for name, budget in (("first", 1.0), ("second", 3.0)):
        (tmp_path / f"{name}.toml").write_text(text.format(budget))
    files = [str(tmp_path / f"{name}.toml") for name in ("first", "second")]
    told = CliRunner().invoke(app, ["account", "plan", *files, "--grant", "2"])
    assert told.exit_code == 1
    assert "client-00 granted ε = 2 (δ = 1e-05)" in told.output
    assert "does not fit" in told.output
    said = json.loads(CliRunner().invoke(app, ["account", "plan", *files[:1], "--grant", "2", "--json"]).output)
    assert said["runs"][0]["fits"]
    assert CliRunner().invoke(app, ["account", "plan", *files]).exit_code != 0
