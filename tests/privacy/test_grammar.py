"""The grammar of the journal, rule by rule: what is refused on reading and on writing, and older formats."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forger import CRYPTOGRAPHIC, Row, Rows, as_format_1, forged, head_of, rows_of, write
from ledger_actor import SPEC, plan, release

from modicum.errors import UserError
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import NoSampling, Release
from modicum.privacy.exact import parse, unlike
from modicum.privacy.ledger import Ledger, journal
from modicum.privacy.ledger.budgets import Refused
from modicum.privacy.ledger.grammar import KINDS, Grammar, RunEntry, Said, Settlement
from modicum.privacy.ledger.journal import FORMAT, Entry, Journal, LedgerDamaged
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.verify import verify

PLAN_A, PLAN_B, RESERVED_A, RESERVED_B, SETTLED_A = 1, 2, 3, 4, 5  # places in the list of rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run with seeded noise, two clients, three reservations, one of them settled."""
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, "run-1", SimulatedNoise(3)) as ledger:
        ledger.declare([plan("a"), plan("b")])
        tokens = ledger.reserve([release("a"), release("b")])
        ledger.settle(tokens[0], b"message")
        ledger.reserve([release("a", 1)])
        Certificate.from_ledger(ledger).write(tmp_path / "certificate.json")
    return path


def body(row: Row, **changed: Any) -> Row:
    return row.saying({**row.value, **changed})


def without(row: Row, name: str) -> Row:
    return row.saying({key: value for key, value in row.value.items() if key != name})


def on(at: int, change: Callable[[Row], Row]) -> Callable[[Rows], Rows]:
    return lambda rows: [*rows[:at], change(rows[at]), *rows[at + 1 :]]


def then(make: Callable[[Rows], Row]) -> Callable[[Rows], Rows]:
    return lambda rows: [*rows, make(rows)]


def settling(number: int | None) -> Callable[[Rows], Rows]:
    return then(lambda rows: replace(rows[SETTLED_A], refers=number))


FORGERIES: dict[str, tuple[Callable[[Rows], Rows], int, str]] = {
    "second run": (then(lambda r: body(r[0], noise=CRYPTOGRAPHIC)), 8, "one 'run' entry"),
    "the same run again": (then(lambda r: r[0]), 8, "one 'run' entry"),
    "no run": (lambda r: r[1:], 1, "begins with its 'run' entry"),
    "run later": (lambda r: [r[1], r[0], *r[2:]], 1, "begins with its 'run' entry"),
    "run with a key": (on(0, lambda r: replace(r, key="run")), 1, "key does not follow"),
    "unknown noise": (on(0, lambda r: body(r, noise={**CRYPTOGRAPHIC, "source": "good"})), 1, "noise source"),
    "noise that contradicts itself": (
        on(0, lambda r: body(r, noise={**CRYPTOGRAPHIC, "simulation": True})),
        1,
        "cannot have 'simulation'",
    ),
    "noise with a field more": (on(0, lambda r: body(r, noise={**CRYPTOGRAPHIC, "x": 1})), 1, "'noise.x'"),
    "noise with a number for a yes": (
        on(0, lambda r: body(r, noise={**CRYPTOGRAPHIC, "simulation": 0})),
        1,
        "'noise.simulation' cannot be 0",
    ),
    "another format inside": (on(0, lambda r: body(r, format=3)), 1, "it has format 3, its file 2"),
    "no format inside": (as_format_1, 1, "it has format 1, its file 2"),
    "second plan without a key": (
        then(lambda r: replace(body(r[PLAN_A], budget=0.08), key=None)),
        8,
        "key does not follow",
    ),
    "second plan under another key": (
        then(lambda r: replace(body(r[PLAN_A], budget=0.08), key='["a",""]')),
        8,
        "key does not follow",
    ),
    "plan under the key of another client": (
        lambda r: [r[0], replace(r[PLAN_A], key='["c"]'), *r[2:]],
        2,
        "key does not follow",
    ),
    "plan after its reservations": (
        lambda r: [r[0], *r[2:5], r[PLAN_A]],
        3,
        "unknown-client: 'a' has no plan",
    ),
    "plan with a field more": (on(PLAN_A, lambda r: body(r, note="")), 2, "'note' is not known"),
    "plan with a field less": (on(PLAN_A, lambda r: without(r, "order")), 2, "'order' is missing"),
    "plan with text for a number": (on(PLAN_A, lambda r: body(r, budget="8")), 2, "'budget' cannot be '8'"),
    "spec with a field more": (
        on(PLAN_A, lambda r: body(r, spec={**r.value["spec"], "epsilon": 1})),
        2,
        "'spec.epsilon' is not known",
    ),
    "plan that refers": (on(PLAN_A, lambda r: replace(r, refers=1)), 2, "a settlement, and nothing else"),
    "reservation of an unknown client": (
        then(lambda r: body(r[RESERVED_A], client="c").keyed()),
        8,
        "unknown-client: 'c' has no plan",
    ),
    "reservation under another key": (
        on(RESERVED_A, lambda r: replace(r, key='["b",9,0,"update"]')),
        4,
        "key does not follow",
    ),
    "reservation without a key": (on(RESERVED_A, lambda r: replace(r, key=None)), 4, "key does not follow"),
    "reservation that passes for a settlement": (
        then(lambda r: replace(body(r[RESERVED_A], round=9).keyed(), refers=5)),
        8,
        "a settlement, and nothing else",
    ),
    "reservation with credit": (on(RESERVED_A, lambda r: body(r, count=-5)), 4, "count from 1"),
    "reservation with a field more": (on(RESERVED_A, lambda r: body(r, void=True)), 4, "'void' is not known"),
    "block with a field more": (
        on(RESERVED_A, lambda r: body(r, blocks=[{**r.value["blocks"][0], "z": 1}])),
        4,
        "'blocks[0].z' is not known",
    ),
    "settlement of nothing": (settling(None), 8, "a settlement, and nothing else"),
    "settlement of a plan": (settling(2), 8, "no reservation that is still open"),
    "settlement of what comes later": (settling(9), 8, "no reservation that is still open"),
    "settlement of a settlement": (settling(6), 8, "no reservation that is still open"),
    "settlement with a key": (on(SETTLED_A, lambda r: replace(r, key="k")), 6, "key does not follow"),
    "settlement with a field more": (on(SETTLED_A, lambda r: body(r, refund=1)), 6, "'refund' is not known"),
    "settlement without a digest": (on(SETTLED_A, lambda r: body(r, digest="none")), 6, "names a SHA-256"),
    "void": (then(lambda _: Row("void", None, 5, "{}")), 8, "kind 'void' is not known"),
    "reopen": (then(lambda r: replace(r[PLAN_A], kind="reopen", key=None)), 8, "kind 'reopen' is not known"),
    "a field twice": (
        on(PLAN_A, lambda r: replace(r, body=r.body.replace('{"budget"', '{"budget":0.08,"budget"', 1))),
        2,
        "not in canonical form",
    ),
    "spaces": (on(PLAN_A, lambda r: replace(r, body=r.body.replace(",", ", "))), 2, "not in canonical form"),
    "no JSON": (on(PLAN_A, lambda r: replace(r, body="{")), 2, "entry 2"),
    "a list": (on(PLAN_A, lambda r: replace(r, body="[]")), 2, "an entry's body is an object"),
    "endless brackets": (on(PLAN_A, lambda r: replace(r, body="[" * 100_000)), 2, "entry 2"),
    "numbers beyond any": (on(PLAN_A, lambda r: body(r, budget=10**400)), 2, "entry 2"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_what_is_not_in_the_grammar_is_refused_and_named(path: Path, name: str) -> None:
    forge, entry, words = FORGERIES[name]
    write(path, forge(rows_of(path)))
    for read_only in (True, False):
        with pytest.raises(LedgerDamaged) as caught:
            Ledger.open(path, read_only=read_only)
        assert words in str(caught.value)
        assert caught.value.entry == entry
    outcome = verify(path)
    assert not outcome.matches
    assert f"entry {entry}:" in outcome.problems[0]


@pytest.mark.parametrize("what", ["plan", "reservation", "settlement"])
def test_the_file_holds_nothing_twice(path: Path, what: str) -> None:
    at = {"plan": PLAN_A, "reservation": RESERVED_A, "settlement": SETTLED_A}[what]
    rows = rows_of(path)
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        write(path, [*rows, rows[at]])


def test_the_honest_ledger_passes(path: Path) -> None:
    grammar = Grammar(FORMAT)
    for number, row in enumerate(rows_of(path), 1):
        entry = Entry(number, row.kind, row.key, row.refers, row.body, "")
        grammar.take(entry, grammar.understand(entry))
    assert verify(path.parent).matches


def test_whole_numbers_may_stand_for_floats(tmp_path: Path) -> None:
    """Who grants ε = 8 in Python writes 8, and the reader has 8.0."""
    planned = (PlannedRelease("update", 50, NoSampling(), 4),)
    with Ledger.create(tmp_path / "x.sqlite", "r", CryptoNoise()) as ledger:
        ledger.declare([PrivacyPlan(client="a", spec=SPEC, budget=8, releases=planned)])
    with Ledger.open(tmp_path / "x.sqlite") as ledger:
        assert ledger.plans["a"].budget == 8.0


def add(ledger: Ledger, *entries: tuple[Said, int | None]) -> None:
    with ledger._adding() as append:
        for said, refers in entries:
            append(said, refers)


@pytest.mark.parametrize(
    ("said", "refers", "words"),
    [
        (RunEntry("run-1", CRYPTOGRAPHIC, FORMAT), None, "one 'run' entry"),
        (plan("a", budget=0.08), None, "has a plan already"),
        (release("nobody"), None, "unknown-client"),
        (Settlement("0" * 64, 0), None, "a settlement, and nothing else"),
        (Settlement("0" * 64, 0), 4, "no reservation that is still open"),
        (plan("c"), 4, "a settlement, and nothing else"),
        (replace(release("a", 5), count=2.0), None, "'count' cannot be 2.0"),  # type: ignore[arg-type]
    ],
)
def test_nothing_is_written_that_could_not_be_read(path: Path, said: Said, refers: int | None, words: str) -> None:
    with Ledger.open(path) as ledger:
        before, entries = ledger.head(), len(ledger)
        with pytest.raises(UserError, match=words):
            add(ledger, (plan("d"), None), (said, refers))
        assert (ledger.head(), len(ledger)) == (before, entries)
        ledger.declare([plan("d")])  # what was rolled back can be said again
    Ledger.open(path).close()


def test_a_noise_source_that_contradicts_itself_begins_no_run(tmp_path: Path) -> None:
    class Boasting(SimulatedNoise):
        def describe(self) -> dict[str, Any]:
            return {**super().describe(), "simulation": False}

    with pytest.raises(UserError, match="cannot have 'simulation'"):
        Ledger.create(tmp_path / "x.sqlite", "r", Boasting(1))
    assert not (tmp_path / "x.sqlite").exists()


# Spending again.


def spend_all(path: Path) -> list[Release]:
    planned = (PlannedRelease("update", 50.0, NoSampling(), 2),)
    spent = [release("p", 0), release("p", 1)]
    with Ledger.create(path, "r", CryptoNoise()) as ledger:
        ledger.declare([PrivacyPlan(client="p", spec=SPEC, budget=1.0, releases=planned)])
        ledger.settle_many((token, b"m") for token in ledger.reserve(spent))
    return spent


def append_plan_again(path: Path) -> None:
    rows = rows_of(path)
    write(path, [*rows, replace(rows[1], key=None)])


def test_a_second_plan_does_not_reopen_a_spent_one(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    spend_all(path)
    append_plan_again(path)
    with pytest.raises(LedgerDamaged, match="entry 7: its key does not follow"):
        Ledger.open(path, CryptoNoise())


def test_nor_while_the_ledger_is_open(tmp_path: Path) -> None:
    """An entry that was refused once is refused again: nothing is written after it, whoever asks how often."""
    path = tmp_path / "x.sqlite"
    spend_all(path)
    with Ledger.open(path) as ledger:
        append_plan_again(path)
        for _ in range(2):
            for act in (
                lambda: ledger.reserve([release("p", 2)]),
                lambda: ledger.declare([plan("q")]),
                lambda: ledger.refusal(release("p", 2)),
                ledger.head,
                ledger.verify_chain,
            ):
                with pytest.raises(LedgerDamaged) as caught:
                    act()
                assert caught.value.entry == 7
    assert len(rows_of(path)) == 7


def test_a_reader_that_lets_the_last_plan_win_spends_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: what the tests above would miss."""
    path = tmp_path / "x.sqlite"
    spend_all(path)
    append_plan_again(path)
    monkeypatch.setattr(Grammar, "understand", lambda _, e: KINDS[e.kind].says.from_dict(e.value))
    with Ledger.open(path) as ledger:
        ledger.reserve([release("p", 2), release("p", 3)])
        with pytest.raises(Refused):
            ledger.reserve([release("p", 4)])


def test_a_trigger_of_somebody_else_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could drop each charge as it is written; without the check it does."""
    forget = (
        "CREATE TRIGGER helpful AFTER INSERT ON journal BEGIN DELETE FROM journal WHERE number = new.number; END"
    )
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TRIGGER journal_keeps_every_entry")
        db.execute(forget)
        db.commit()
    for read_only in (True, False):
        with pytest.raises(LedgerDamaged, match="trigger of somebody else, 'helpful'"):
            Ledger.open(path, read_only=read_only)
    monkeypatch.setattr(journal, "TRIGGERS", {**journal.TRIGGERS, "helpful": forget})
    with Ledger.open(path) as ledger:
        ledger.reserve([release("b", 1)])
    with Ledger.open(path) as ledger:
        assert ledger.spent("b") == [release("b")]  # forgotten


# Formats.


def test_an_older_folder_is_verified_by_the_same_rules(path: Path, tmp_path: Path) -> None:
    rows = as_format_1(rows_of(path))
    older = forged(tmp_path / "older", path.parent, rows, format=1)
    certify(older)
    outcome = verify(older, head=head_of(rows))
    assert outcome.matches
    assert (outcome.format, outcome.simulation) == (1, True)
    with Ledger.open(older / "ledger.sqlite", SimulatedNoise(3)) as ledger:
        ledger.reserve([release("b", 1)])  # and goes on as it is
    assert verify(older / "ledger.sqlite").format == 1


@pytest.mark.parametrize("name", ["second run", "second plan without a key", "plan with a field more", "void"])
def test_an_older_forgery_is_found_too(path: Path, name: str) -> None:
    forge, entry, words = FORGERIES[name]
    write(path, forge(as_format_1(rows_of(path))), format=1)
    with pytest.raises(LedgerDamaged, match=words) as caught:
        Ledger.open(path)
    assert caught.value.entry == entry


def test_the_format_cannot_be_changed_outside_the_chain(path: Path) -> None:
    write(path, rows_of(path), format=1)
    with pytest.raises(LedgerDamaged, match="it has format 2, its file 1"):
        Ledger.open(path)
    write(path, rows_of(path), format=3)
    with pytest.raises(UserError, match="has ledger format 3, and this version reads formats 1 and 2"):
        Ledger.open(path)


def certify(folder: Path) -> None:
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        Certificate.from_ledger(ledger).write(folder / "certificate.json")


def test_another_journal_may_have_another_grammar(tmp_path: Path) -> None:
    """The file knows nothing of a ledger's entries, and what it holds is no ledger."""
    with Journal.create(tmp_path / "x.sqlite") as other:
        with other.transaction(lambda _: None):
            other.append("grant", {"epsilon": 1.0}, key="k")
        assert [e.value for e in Journal.open(tmp_path / "x.sqlite").news()] == [{"epsilon": 1.0}]
    with pytest.raises(LedgerDamaged, match="kind 'grant' is not known here"):
        Ledger.open(tmp_path / "x.sqlite")


def test_exact_reading() -> None:
    assert unlike({"a": [1, {"b": 2.0}]}, {"a": [1.0, {"b": 2.0}]}) is None
    for said, words in (
        ({"a": 1, "b": 1}, "'b' is not known"),
        ({}, "'a' is missing"),
        ({"a": True}, "'a' cannot be True"),
        ({"a": 1.0}, "'a' cannot be 1.0"),
        ({"a": [1]}, "'a' cannot be"),
    ):
        assert words in str(unlike(said, {"a": 1}))
    for text, words in (
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": NaN}', "NaN"),
        ("[]", "no JSON object"),
    ):
        with pytest.raises(UserError, match=words):
            parse(text)
