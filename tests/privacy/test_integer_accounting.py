"""What integer noise costs, wherever a number is printed: plans, certificates, verify, lifetime accounts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.privacy.test_certificate import DOCS, check_object
from tests.rows import experiment

from modicum import verify
from modicum.errors import UserError
from modicum.federation.simulation import Simulation
from modicum.methods import DpFedAvg, DpSgd
from modicum.privacy import second_opinion
from modicum.privacy.accounting import epsilon, gdp
from modicum.privacy.accounting.choose import SKELLAM
from modicum.privacy.accounting.sampler_charge import SHARE, charge, draws_distance, failures, largest_epsilon
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import NoSampling
from modicum.privacy.integer_noise import Rounding
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger import ledger as ledger_module
from modicum.privacy.ledger.budgets import Reason, guard_for
from modicum.privacy.lifetime import DrawRefused, Filter, Lifetime
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.noise.integer_terms import IntegerTerms, agree
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.skellam_second_opinion import delta_taken
from modicum.privacy.spec import PrivacySpec, SecureAggregation, Unit
from modicum.privacy.views import Adjacency, Variant

VIEW = SecureAggregation(20, 1, 3, Variant.SIGNED_SURVIVORS)
SPEC = PrivacySpec(unit=Unit.CLIENT, view=VIEW)
TERMS = agree(dimension=650, smallest_multiplier=6.0, largest_multiplier=6.0, clients=20, honest=VIEW.noise_shares)


def planned(terms: IntegerTerms = TERMS, count: int = 100, **changes: Any) -> PlannedRelease:
    noise = terms.noise(terms.square(6.0))
    z = SPEC.own(terms.multiplier(noise.square))
    return replace(PlannedRelease("update", z, NoSampling(), count, noise), **changes)


def plan(*releases: PlannedRelease, **changes: Any) -> PrivacyPlan:
    given: dict[str, Any] = {"client": "a", "spec": SPEC, "budget": 9.0, "releases": releases or (planned(),)}
    return PrivacyPlan(**(given | changes))


def test_integer_noise_is_priced_as_the_gaussian_it_is_worth_at_a_smaller_delta() -> None:
    found = epsilon(plan().releases, SPEC)
    mu = math.sqrt(100) / TERMS.multiplier(TERMS.square(6.0))
    assert found.accountant == SKELLAM
    assert found.epsilon == pytest.approx(gdp.epsilon_from_mu(mu, 1e-5 * (1 - SHARE)), rel=1e-12)
    floats = epsilon([replace(planned(), integers=None)], SPEC).epsilon
    assert floats < found.epsilon < floats * 1.0002


def test_what_the_draws_add_fits_into_what_is_kept_for_them() -> None:
    """Negative control: without the charge an ε is certified that the sampler's promise does not reach."""
    releases = plan().releases
    found = epsilon(releases, SPEC).epsilon
    assert 0 < charge(releases, found) < SHARE * 1e-5
    most = largest_epsilon(releases, 1e-5)
    assert charge(releases, most * 0.999) < SHARE * 1e-5 < charge(releases, most * 1.01)
    noise = TERMS.noise(TERMS.square(6.0))
    assert draws_distance(releases) == pytest.approx(TERMS.table.distance * noise.dimension * 16 * 100)
    loud = PlannedRelease("update", 0.05, NoSampling(), 100, noise)
    with pytest.raises(UserError, match="too coarsely"):
        epsilon([loud], SPEC)
    assert epsilon([replace(loud, integers=None)], SPEC).epsilon > most


def test_plans_and_events_with_integers_survive_the_ledger() -> None:
    there = plan()
    again = PrivacyPlan.from_dict(there.to_dict())
    assert again == there
    assert "integers" not in replace(planned(), integers=None).to_dict()


def finished(folder: Path, **settings: Any) -> Path:
    method = DpFedAvg(batch=4, dropouts=1) if "level" not in settings else settings.pop("level")
    run = Simulation(experiment(method, noise="integer", **settings), folder, noise=SimulatedNoise(1))
    list(run.rounds())
    Certificate.from_ledger(run.ledger).write(folder / "certificate.json")
    run.close()
    return folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "ideal"),
        ({"secure_aggregation": "protocol"}, "signed-survivors, threshold 3 of 4"),
        ({"secure_aggregation": "honest-but-curious"}, "honest but curious"),
        ({"level": DpSgd(view="secure-aggregation")}, "ideal"),
    ],
)
def test_a_certificate_holds_the_terms_and_verifies(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = finished(tmp_path / "r", **settings)
    certificate = Certificate.read(folder / "certificate.json")
    assert any(words in said for said in certificate.assumptions)
    assert any("Skellam" in said for said in certificate.assumptions)
    assert not any("low bits" in said for said in certificate.assumptions)
    for line in certificate.clients.values():
        assert line.integers is not None
        assert 0 < line.integers["delta_charge"] < 1e-8
        for query in line.integers["queries"].values():
            assert {"dimension", "steps", "share", "honest", "clients", "bits", "square"} <= set(query)
            assert query["honest"] == line.spec.view.noise_shares
    schema = json.loads(re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)[0])
    for line in json.loads(certificate.to_json())["clients"].values():
        check_object(schema["$defs"]["client"], line)
    found = verify(folder)
    assert found.matches, [(c.problems, found.problems) for c in found.clients]
    for check in found.clients:
        assert check.second_opinion == pytest.approx(check.recomputed, rel=2e-3)


def test_a_certificate_without_the_charge_or_with_other_terms_does_not_match(tmp_path: Path) -> None:
    folder = finished(tmp_path / "r")
    certificate = Certificate.read(folder / "certificate.json")
    first = certificate.clients["client-00"]
    assert first.integers is not None
    queries = first.integers["queries"]
    more = {**queries, "update": {**queries["update"], "honest": queries["update"]["honest"] + 1}}
    for wrong in ({**first.integers, "delta_charge": 0.0}, {**first.integers, "queries": more}, None):
        forged = replace(certificate, clients={**certificate.clients, "client-00": replace(first, integers=wrong)})
        forged.write(folder / "certificate.json")
        assert not verify(folder).matches


def test_floats_certified_as_integers_do_not_match(tmp_path: Path) -> None:
    """Negative control: the ledger of a run with floating-point noise, a certificate that speaks of a lattice."""
    folder = tmp_path / "r"
    run = Simulation(experiment(DpFedAvg(batch=4)), folder, noise=SimulatedNoise(1))
    list(run.rounds())
    certificate = Certificate.from_ledger(run.ledger)
    run.close()
    integers = {"queries": {"update": TERMS.noise(10).to_dict()}, "delta_charge": 1e-20}
    lines = {name: replace(line, integers=integers) for name, line in certificate.clients.items()}
    replace(certificate, clients=lines).write(folder / "certificate.json")
    assert not verify(folder).matches


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"honest": 17}, "certain of 16"),  # noise counted for one client too many
        ({"share": TERMS.share / 2}, "are worth"),
        ({"square": TERMS.square(6.0) * 2}, "are worth"),
        ({"share": 1e-9}, "needs a variance of at least 4"),
        ({"clients": TERMS.clients - 1}, "for sums of"),  # fewer, who would have to add more each
        ({"rounding": Rounding.SUM}, "bounds no client's part"),
        ({"bits": 16}, "a modulus of 16 bits"),
    ],
)
def test_a_ledger_whose_plan_claims_too_much_is_found(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: who wrote the ledger checked nothing. The second opinion finds two by itself."""
    noise = replace(TERMS.noise(TERMS.square(6.0)), **change)
    monkeypatch.setattr(ledger_module, "check_plan", lambda _plan: None)
    ledger = Ledger.create(tmp_path / "ledger.sqlite", "run", SimulatedNoise(0))
    wrong = plan(planned(integers=noise))
    ledger.declare([wrong])
    ledger.close()
    (check,) = verify(tmp_path / "ledger.sqlite").clients
    assert any(said in problem for problem in check.problems)
    if said == "are worth":
        assert second_opinion.plan_epsilon(wrong) > 1.2 * epsilon(wrong.releases, SPEC).epsilon


def test_floats_under_masks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who takes the lattice out of plan and events alike; an ideal protocol may have floats."""
    monkeypatch.setattr(ledger_module, "check_plan", lambda _plan: None)
    bare = planned(integers=None)
    ideal = replace(SPEC, view=replace(VIEW, variant=Variant.IDEAL))
    ledger = Ledger.create(tmp_path / "ledger.sqlite", "run", SimulatedNoise(0))
    ledger.declare([plan(bare), plan(bare, client="b", spec=ideal)])
    ledger.close()
    masked, assumed = verify(tmp_path / "ledger.sqlite").clients
    assert any("noise of floats" in problem for problem in masked.problems)
    assert assumed.matches


def test_the_second_opinion_agrees_with_what_is_true() -> None:
    assert second_opinion.plan_epsilon(plan()) == pytest.approx(epsilon(plan().releases, SPEC).epsilon, rel=1e-3)


def test_a_filter_does_not_take_integer_noise() -> None:
    from modicum.privacy.events import Block, Release

    filtered = PrivacyPlan(client="a", spec=SPEC, budget=9.0, guard=Guard.GDP_FILTER)
    release = Release(
        client="a", round=0, spec=SPEC, blocks=(Block("update", 1.0, 6.0),), sampler=NoSampling(),
        integers=planned().integers,
    )  # fmt: skip
    refusal = guard_for(filtered).refusal(release)
    assert refusal is not None
    assert refusal.reason is Reason.NO_SOUND_CHARGE
    assert guard_for(filtered).refusal(replace(release, integers=None)) is None


@pytest.mark.parametrize("order", [None, 8.0])
def test_a_lifetime_account_pays_for_the_draws(order: float | None) -> None:
    """A run costs as much as its Gaussians and a little more: what is left of δ at the cap covers all draws."""
    grant = Lifetime(
        unit=Unit.CLIENT,
        adjacency=Adjacency.ZERO_OUT,
        filter=Filter.GDP if order is None else Filter.RDP,
        budget=10.0,
        delta=1e-5,
        order=order,
    )
    floats = plan(replace(planned(), integers=None))
    extra = grant.price(plan()) - grant.price(floats)
    assert 0 < extra < 1e-9 * grant.cap
    if order is None:  # many such runs, up to the cap: the rest of δ covers what their draws add
        runs = 1e6
        left = gdp.delta(10.0, math.sqrt(grant.cap)) - gdp.delta(10.0, math.sqrt(grant.cap - runs * extra))
        assert left >= runs * charge(plan().releases, 10.0) > 0


@pytest.mark.parametrize(("clients", "graphs"), [(100, 0), (101, 100)])
def test_sums_along_a_drawn_graph_are_charged(clients: int, graphs: int) -> None:
    """Beyond 100 clients δ pays 2^−60 a sum, by either opinion; where that does not fit, nothing is certified."""
    terms = agree(dimension=650, smallest_multiplier=6.0, largest_multiplier=6.0, clients=clients, honest=90)
    releases = (planned(terms),)
    draws = delta_taken([(replace(r.integers, clients=100), r.count) for r in releases if r.integers], 0.0)
    assert failures(releases) == graphs * 2.0**-60
    assert charge(releases, 0.0) == pytest.approx(draws + graphs * 2.0**-60, rel=1e-9)
    taken = delta_taken([(r.integers, r.count) for r in releases if r.integers], 0.0)
    assert taken == pytest.approx(charge(releases, 0.0), rel=1e-9)
    small = 50 * 2.0**-60 / SHARE
    assert (largest_epsilon(releases, small) == 0) == (graphs > 0)


def test_a_lifetime_beyond_the_sampler_is_refused() -> None:
    grant = Lifetime(unit=Unit.CLIENT, adjacency=Adjacency.ZERO_OUT, filter=Filter.GDP, budget=60.0, delta=1e-5)
    with pytest.raises(DrawRefused, match="too coarsely"):
        grant.price(plan())
    assert math.isfinite(grant.price(plan(replace(planned(), integers=None))))
