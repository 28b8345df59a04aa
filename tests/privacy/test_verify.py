"""Verification: match on an honest run, and the client and reason on every kind of lie."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import forger
import pytest
from run_folder import CHARGES, PLAIN, PLANS, RECORD, SECRET, edit, make_run, one

from modicum.errors import MissingExtraError, UserError
from modicum.privacy import second_opinion
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Poisson
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import GENESIS
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.verify import KeptHead, Verification, verify
from modicum.privacy.views import KnownTo

WHOSE = {"order": "rdp", "budget": "gdp"}  # the client whose filter has it


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def wrong(outcome: Verification) -> dict[str, str]:
    return {c.client: "; ".join(c.problems) for c in outcome.clients if not c.matches}


def rewrite(run: Path, change: Callable[[int, str], str], keep: int = 1000) -> None:
    """A forger with full access: changes bodies and their keys, and recomputes every hash."""
    rows = forger.rows_of(run / "ledger.sqlite")[:keep]
    changed = [replace(row, body=change(number, row.body)) for number, row in enumerate(rows, 1)]
    forger.write(run / "ledger.sqlite", [row.keyed() for row in changed])


def certify_again(run: Path) -> None:
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        Certificate.from_ledger(ledger).write(run / "certificate.json")


def test_an_honest_run_matches(run: Path) -> None:
    outcome = verify(run)
    assert outcome.matches, outcome
    assert {c.client for c in outcome.clients} == {p.client for p in PLANS}
    by_name = {c.client: c for c in outcome.clients}
    for name in ("training", "replace", "behind"):
        assert by_name[name].second_opinion == pytest.approx(by_name[name].recomputed, rel=0.01)
    for name in ("gdp", "rdp"):
        assert 0.8 * by_name[name].recomputed < (by_name[name].second_opinion or 0) <= by_name[name].recomputed
    assert by_name["open"].second_opinion is None


def test_a_ledger_alone_can_be_checked(run: Path) -> None:
    outcome = verify(run / "ledger.sqlite")
    assert outcome.matches
    assert not outcome.certificate


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("epsilon", 0.5, "certified ε=0.5"),
        ("epsilon", None, "certified ε=inf"),
        ("delta", 1e-6, "delta"),
        ("adjacency", "replace-one", "adjacency"),
        ("budget", 1.4, "budget"),
        ("releases_made", 49, "releases_made"),
        ("releases_planned", 54, "releases_planned"),
        ("accountant", "gdp-exact", "accountant"),
        ("samplers", [], "samplers"),
        ("meaning", "(0.1, 1e-9)-differential privacy", "words"),
    ],
)
def test_any_changed_figure_is_found(run: Path, field: str, value: Any, words: str) -> None:
    edit(run, lambda c: c["clients"]["training"].update({field: value}))
    outcome = verify(run)
    assert not outcome.matches
    assert list(wrong(outcome)) == ["training"]
    assert words in wrong(outcome)["training"]


def test_missing_and_invented_clients_are_found(run: Path) -> None:
    edit(run, lambda c: c["clients"].update(ghost=c["clients"].pop("gdp")))
    outcome = verify(run)
    assert "not in the certificate" in wrong(outcome)["gdp"]
    assert any("'ghost'" in p for p in outcome.problems)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(run="other"), "run 'other'"),
        (lambda c: c["noise"].update(simulation=True), "noise source"),
        (lambda c: c.update(assumptions=[]), "assumptions"),
        (lambda c: c["ledger"].update(head=GENESIS), "rewritten"),
    ],
)
def test_what_concerns_the_whole_file(run: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    edit(run, change)
    outcome = verify(run)
    assert not outcome.matches
    assert words in " ".join(outcome.problems)


def test_a_cut_ledger_is_found_by_its_certificate(run: Path) -> None:
    entries = Certificate.read(run / "certificate.json").entries
    rewrite(run, lambda _, body: body, keep=entries - 1)
    assert "was cut" in " ".join(verify(run).problems)
    assert verify(run / "ledger.sqlite").matches  # alone it cannot know: the head hash is the witness


def test_a_ledger_that_went_on_is_found(run: Path) -> None:
    with Ledger.open(run / "ledger.sqlite") as ledger:
        ledger.reserve([one("rdp", RECORD, 50.0, SECRET, round=9)])
    assert "went on" in " ".join(verify(run).problems)


def test_a_changed_entry_is_named(run: Path) -> None:
    db = sqlite3.connect(run / "ledger.sqlite")
    db.execute("DROP TRIGGER journal_keeps_every_field")
    db.execute("UPDATE journal SET body = replace(body, '13.69', '23.69') WHERE number = 14")
    db.commit()
    db.close()
    outcome = verify(run)
    assert not outcome.matches
    assert "entry 14 was changed" in outcome.problems[0]


def test_charges_outside_the_plan_are_found_even_in_a_consistent_forgery(run: Path) -> None:
    first = 1 + len(PLANS)
    lies = {
        first + 1: ('"count":25', '"count":50'),
        first + 3: ("2.0", "1.9"),
        first + 7: ('"count":900', '"count":9000'),
    }

    def change(number: int, body: str) -> str:
        return body.replace(*lies[number]) if number in lies else body

    rewrite(run, change)
    certify_again(run)
    found = wrong(verify(run))
    assert "plan-exhausted" in found["training"]
    assert "not-planned" in found["replace"]
    assert "budget-exceeded" in found["rdp"]
    assert "dp-accounting finds" in found["rdp"]


def test_a_forged_budget_is_found(run: Path) -> None:
    rewrite(run, lambda _, body: body.replace('"budget":1.5', '"budget":0.5'))
    certify_again(run)
    assert "more than the budget" in wrong(verify(run))["training"]


def test_a_charge_of_a_client_without_a_plan_is_found(run: Path) -> None:
    rewrite(run, lambda n, body: body.replace('"client":"open"', '"client":"nobody"') if n == 7 else body)
    outcome = verify(run)
    assert any("'open'" in p and "unknown-client" in p for p in outcome.problems)


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_an_accountant_that_errs_is_caught_by_the_second_opinion(
    run: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """The negative control: our accountant off by 3%, in the certificate and in its recomputation alike."""
    from modicum.privacy.accounting import pld

    true = pld.epsilon
    monkeypatch.setattr(pld, "epsilon", lambda *a, **k: factor * true(*a, **k))
    from modicum.privacy.accounting import choose, filters

    choose._epsilon_of.cache_clear()
    filters._plan_guarantee.cache_clear()
    try:
        certify_again(run)
        found = wrong(verify(run))
    finally:
        choose._epsilon_of.cache_clear()
        filters._plan_guarantee.cache_clear()
    assert "dp-accounting finds" in found["training"]


def test_identical_plans_are_priced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    kinds = [PlannedRelease("update", z, SECRET, 20) for z in (3.0, 5.0, 9.0)]
    with Ledger.create(folder / "ledger.sqlite", "r", CryptoNoise()) as ledger:
        ledger.declare(
            PrivacyPlan(client=f"c{i}", spec=RECORD, budget=5.0 + i, releases=(kinds[i % 3],)) for i in range(50)
        )
        Certificate.from_ledger(ledger).write(folder / "certificate.json")
    priced: list[str] = []
    true = second_opinion.plan_epsilon
    monkeypatch.setattr(
        second_opinion, "plan_epsilon", lambda plan, _: (priced.append(plan.client), true(plan))[1]
    )
    assert verify(folder).matches
    assert len(priced) == 3


def test_the_second_opinion_knows_the_library_trap() -> None:
    """Ten Gaussians with z=1: 17.86 under zero-out, 46.21 under replace-one (R6)."""
    planned = (PlannedRelease("update", 1.0, CHARGES[3].sampler, 10),)
    for spec, expected in ((RECORD, 17.86), (PLANS[1].spec, 46.21)):
        plan = PrivacyPlan(client="a", spec=spec, budget=100.0, releases=planned)
        assert second_opinion.plan_epsilon(plan) == pytest.approx(expected, abs=0.01)


def test_bad_input(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match="no ledger at"):
        verify(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no ledger\.sqlite"):
        verify(tmp_path)
    with pytest.raises(UserError, match="not a readable ledger"):
        verify(run / "certificate.json")
    (run / "certificate.json").write_text("{}")
    with pytest.raises(UserError, match="not a certificate"):
        verify(run)
    (run / "certificate.json").unlink()
    with pytest.raises(UserError, match=r"no certificate\.json"):
        verify(run)


def test_without_dp_accounting_it_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtraError, match="pip install dp-accounting"):
        verify(run)


# A head that somebody kept.


def heads(run: Path) -> list[str]:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        return [head for (head,) in db.execute("SELECT hash FROM journal ORDER BY number")]


def test_every_earlier_head_is_found_at_its_entry(run: Path) -> None:
    for entry, head in enumerate(heads(run), 1):
        for said in (head, head[:16], f" {head.upper()}\n"):
            with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
                assert ledger.entry_with_hash(said.strip().lower()) == entry
    outcome = verify(run, head=heads(run)[8].upper())
    assert outcome.matches
    assert outcome.kept == KeptHead(heads(run)[8], 9)
    assert outcome.to_dict()["kept_head"] == {"digits": heads(run)[8], "entry": 9}
    assert verify(run).to_dict()["kept_head"] is None


def test_a_ledger_that_was_cut_or_rewritten_lacks_the_head(run: Path) -> None:
    """Ledger and certificate replaced together: alone they match, and only the witness knows."""
    kept = heads(run)
    rewrite(run, lambda _, body: body, keep=len(kept) - 1)
    certify_again(run)
    assert verify(run).matches
    outcome = verify(run, head=kept[-1])
    assert not outcome.matches
    assert outcome.kept == KeptHead(kept[-1], None)
    assert "cut or rewritten" in outcome.problems[0]
    assert verify(run, head=kept[-2]).matches  # of before what was cut
    rewrite(run, lambda n, body: body.replace('"run-7"', '"run-8"') if n == 1 else body)
    certify_again(run)
    assert verify(run).matches
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        assert [ledger.entry_with_hash(head[:16]) for head in kept] == [None] * len(kept)
    assert not verify(run, head=kept[0][:16]).matches


@pytest.mark.parametrize("head", ["", "0123456789abcde", "g" * 64, "0" * 65, "0x" + "0" * 20])
def test_what_is_no_head(run: Path, head: str) -> None:
    with pytest.raises(UserError, match="64 hexadecimal digits"):
        verify(run, head=head)


def test_the_claim_is_told_with_the_figures(tmp_path: Path) -> None:
    outcome = verify(make_run(tmp_path / "run", SimulatedNoise(3))).to_dict()
    assert outcome["simulation"] is True
    assert outcome["noise"]["seed"] == 3
    by_name = {line["client"]: line for line in outcome["clients"]}
    assert [name for name, line in by_name.items() if not line["private"]] == ["open"]
    behind = by_name["behind"]
    assert (behind["unit"], behind["adjacency"], behind["delta"]) == ("client", "zero-out", 1e-5)
    assert "only the sum of each round" in behind["adversary"]


def forged_plan(path: Path, monkeypatch: pytest.MonkeyPatch, *releases: PlannedRelease) -> PrivacyPlan:
    """A ledger with a plan that nobody checked against its budget."""
    monkeypatch.setattr("modicum.privacy.ledger.ledger.check_plan", lambda _: None)
    plan = PrivacyPlan(client="a", spec=RECORD, budget=1e6, releases=releases)
    with Ledger.create(path, "run-1", CryptoNoise()) as ledger:
        ledger.declare([plan])
    return plan


def test_a_plan_that_cannot_be_computed_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forger may plan more releases than there are numbers; where nobody catches that, verify breaks off."""
    plan = forged_plan(tmp_path / "ledger.sqlite", monkeypatch, PlannedRelease("update", 0.3, PLAIN, 10**400))
    with pytest.raises(OverflowError):
        second_opinion.plan_epsilon(plan)
    outcome = verify(tmp_path / "ledger.sqlite")
    assert not outcome.matches
    assert "beyond what can be computed" in outcome.problems[0]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("order", 10**18, "at most 2,097,152"), ("order", 1e300, "at most"), ("budget", 1e-300, "(RuntimeError)")],
)
def test_numbers_that_nobody_plans_are_one_line(run: Path, field: str, value: float, said: str) -> None:
    """An order of 10^18 is a sum of as many terms; for ε = 10^-300 at the smallest δ no filter has a cap."""
    rows = forger.rows_of(run / "ledger.sqlite")
    [at] = [i for i, row in enumerate(rows) if row.kind == "plan" and row.value["client"] == WHOSE[field]]
    plan = rows[at].value | {field: value}
    if field == "budget":
        plan["spec"]["delta"] = 5e-324
    forger.write(run / "ledger.sqlite", [*rows[:at], rows[at].saying(plan), *rows[at + 1 :]])
    outcome = verify(run / "ledger.sqlite")
    assert not outcome.matches
    assert said in outcome.problems[0]


def sampled(z: float, rate: float, count: int) -> PrivacyPlan:
    release = PlannedRelease("update", z, Poisson(rate, KnownTo.CLIENT), count)
    return PrivacyPlan(client="a", spec=RECORD, budget=1e6, releases=(release,))


@pytest.mark.parametrize(
    "plan", [sampled(60.0, 0.01, 10**5), pytest.param(sampled(0.5, 0.1, 10**6), marks=pytest.mark.heavy)]
)
def test_many_sampled_releases_are_compared_on_a_grid_of_their_own(plan: PrivacyPlan) -> None:
    """On the library's own grid the first is 5% too large, and the second takes a minute and gigabytes."""
    ours = plan_guarantee(plan).epsilon
    assert second_opinion.too_much(plan) == []
    assert second_opinion.plan_epsilon(plan, ours) == pytest.approx(ours, rel=0.004)


def test_the_library_s_own_grid_would_accuse_an_honest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_opinion, "_grid", lambda *_: second_opinion.GRID)
    plan = sampled(60.0, 0.01, 10**5)
    assert second_opinion.plan_epsilon(plan) > 1.02 * plan_guarantee(plan).epsilon


@pytest.mark.parametrize(
    "releases",
    [
        [PlannedRelease("update", 500.0, SECRET, 10**6 + 1)],
        [PlannedRelease("update", 5.0 + i, SECRET, 1) for i in range(second_opinion.MOST_KINDS + 1)],
    ],
)
def test_what_would_keep_the_library_busy_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, releases: list[PlannedRelease]
) -> None:
    forged_plan(tmp_path / "ledger.sqlite", monkeypatch, *releases)

    def asked(*_: object) -> float:
        raise AssertionError("the library was asked")

    monkeypatch.setattr(second_opinion, "plan_epsilon", asked)
    [line] = verify(tmp_path / "ledger.sqlite").clients
    assert "a second opinion is computed for at most 1,000,000" in line.problems[0]
    monkeypatch.setattr(second_opinion, "too_much", lambda _: [])  # the negative control
    with pytest.raises(AssertionError, match="was asked"):
        verify(tmp_path / "ledger.sqlite")
