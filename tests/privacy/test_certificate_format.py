"""A certificate says what it must and nothing else, in the newest format and in earlier ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folder import edit, make_run, old

from modicum.errors import UserError
from modicum.privacy.certificate import Certificate
from modicum.privacy.verify import Verification, verify


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def wrong(outcome: Verification) -> dict[str, str]:
    return {c.client: "; ".join(c.problems) for c in outcome.clients if not c.matches}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(note="audited"), "'note' is not known"),
        (lambda c: c["clients"]["gdp"].update(true_epsilon=0.1), "'terms[3].true_epsilon' is not known"),
        (lambda c: c["clients"]["gdp"]["view"].update(x=1), "'terms[3].view.x' is not known"),
        (lambda c: c["ledger"].update(checked=True), "'ledger.checked' is not known"),
        (lambda c: c["noise"].update(quality="good"), "'noise.quality' is not known"),
        (lambda c: c["noise"].update(simulation=0), "'noise.simulation' cannot be 0"),
        (lambda c: c["clients"]["gdp"].pop("budget"), "no 'budget'"),
        (lambda c: c["noise"].pop("sentence"), "'noise.sentence' is missing"),
        (lambda c: c.update(schema="modicum-certificate/5"), "this version reads 'modicum-certificate/4'"),
        (lambda c: old(c, "modicum-certificate/2") or c.update(x=1), "'x' is not known"),
        (lambda c: old(c, "modicum-certificate/2") or c["clients"]["gdp"].update(x=1), "'clients.gdp.x'"),
        (lambda c: c["clients"]["gdp"].update(epsilon="2.0"), "'clients.gdp.epsilon' cannot be '2.0'"),
    ],
)
def test_a_certificate_is_read_exactly(run: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    edit(run, change)
    with pytest.raises(UserError, match=r"certificate\.json: not a certificate") as caught:
        verify(run)
    assert words in str(caught.value)


def test_a_certificate_from_before_accounts_keeps_none(run: Path) -> None:
    edit(run, lambda c: old(c, "modicum-certificate/1") or c.pop("account"))
    assert verify(run).matches
    assert not Certificate.read(run / "certificate.json").account["kept"]
    edit(run, lambda c: c.update(account={"kept": True, "sentence": "ε = 0.1 for life"}))
    with pytest.raises(UserError, match="'account' is not known"):
        verify(run)


def test_a_certificate_with_every_line_in_full_is_read_by_the_same_rules(run: Path) -> None:
    new = Certificate.read(run / "certificate.json")
    edit(run, lambda c: old(c, "modicum-certificate/2"))
    lines = {name: replace(line, groups={}) for name, line in new.clients.items()}
    assert Certificate.read(run / "certificate.json") == replace(new, clients=lines)
    assert verify(run).matches
    edit(run, lambda c: c["clients"]["training"].update(delta=1e-6))
    assert list(wrong(verify(run))) == ["training"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["terms"].append(c["terms"][0]), "has 7 entries and ought to have 6"),  # that nobody has
        (lambda c: c["clients"]["gdp"].update(terms=99), "client 'gdp' has the terms 99, and there are 6"),
        (lambda c: c["clients"]["gdp"].update(terms=-1), "client 'gdp' has the terms -1"),
        (lambda c: c["clients"]["gdp"].update(terms=True), "client 'gdp' has the terms True"),
        (lambda c: c["clients"]["gdp"].update(meaning="(0.1, 1e-9)"), "'clients.gdp.meaning' is not known"),
        (lambda c: c.pop("terms"), "no 'terms'"),
    ],
)
def test_shared_terms_are_read_exactly(run: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    path = run / "certificate.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="not a certificate") as caught:
        verify(run)
    assert words in str(caught.value)


def test_a_certificate_says_nothing_twice(run: Path) -> None:
    path = run / "certificate.json"
    path.write_text(path.read_text().replace('"epsilon": 2.0', '"epsilon": 0.1, "epsilon": 2.0'))
    with pytest.raises(UserError, match="'epsilon' is there twice"):
        verify(run)


def test_a_reader_that_takes_what_it_knows_misses_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the two tests above."""
    from modicum.privacy import certificate

    monkeypatch.setattr(certificate, "unlike", lambda *_: None)
    monkeypatch.setattr(certificate, "parse", json.loads)
    edit(run, lambda c: c["clients"]["gdp"].update(true_epsilon=0.1))
    assert verify(run).matches
