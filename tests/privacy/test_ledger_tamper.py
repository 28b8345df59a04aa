"""A changed ledger is found out: every field of every entry, missing entries, foreign and damaged files."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_actor import new_ledger, plan, release

from modicum.errors import UserError
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import GENESIS, Journal, LedgerDamaged, entry_hash

COLUMNS = ("number", "kind", "key", "refers", "body", "hash")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with new_ledger(path, ["a", "b"]) as ledger:
        tokens = ledger.reserve([release("a"), release("b")])
        ledger.settle(tokens[0], b"message" * 50)
        ledger.reserve([release("a", 1)])
    return path


def raw(path: Path, *statements: tuple[str, tuple[Any, ...]]) -> None:
    """Edits the file behind the ledger's back."""
    db = sqlite3.connect(path)
    for name in ("journal_keeps_every_field", "journal_keeps_every_entry"):
        db.execute(f"DROP TRIGGER IF EXISTS {name}")
    for statement, values in statements:
        db.execute(statement, values)
    db.commit()
    db.close()


def rows(path: Path) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(path)
    found = db.execute("SELECT * FROM journal ORDER BY number").fetchall()
    db.close()
    return found


def changes(path: Path) -> Iterator[tuple[int, str, Any]]:
    for row in rows(path):
        for column, old in zip(COLUMNS, row, strict=True):
            if column == "number":
                yield row[0], column, 1000
            elif column == "refers":
                yield row[0], column, 999
            elif column == "hash":
                yield row[0], column, GENESIS
            elif column == "body":
                yield row[0], column, old.replace("1", "2", 1)
                yield row[0], column, b"\xff\xfe"
                yield row[0], column, sqlite3.Binary(old.encode())
            else:
                yield row[0], column, "changed"


def test_any_changed_field_is_located(path: Path) -> None:
    original = path.read_bytes()
    every = list(changes(path))
    assert len(every) > 10
    for number, column, value in every:
        path.write_bytes(original)
        raw(path, (f"UPDATE journal SET {column} = ? WHERE number = ?", (value, number)))
        with pytest.raises(LedgerDamaged) as caught:
            Ledger.open(path)
        assert caught.value.entry == number, (number, column, value)


def test_text_that_is_no_text_is_located(path: Path) -> None:
    raw(path, ("UPDATE journal SET body = CAST(x'7bfffe7d' AS TEXT) WHERE number = 3", ()))
    with pytest.raises(LedgerDamaged) as caught:
        Ledger.open(path)
    assert caught.value.entry == 3


def test_a_ledger_without_the_chain_check_misses_changes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the test above is what notices."""
    monkeypatch.setattr(Journal, "_check", lambda *_: None)
    before = rows(path)
    raw(path, ("UPDATE journal SET body = replace(body, '50.0', '70.0') WHERE number = 4", ()))
    assert rows(path) != before
    Ledger.open(path).close()


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_removed_entry_is_located(path: Path, number: int) -> None:
    raw(path, ("DELETE FROM journal WHERE number = ?", (number,)))
    with pytest.raises(LedgerDamaged) as caught:
        Ledger.open(path)
    assert caught.value.entry == number


def test_an_open_ledger_notices_changes_on_request(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.verify_chain()
        raw(path, ("UPDATE journal SET kind = 'plan' WHERE number = 4", ()))
        with pytest.raises(LedgerDamaged) as caught:
            ledger.verify_chain()
    assert caught.value.entry == 4


def test_the_journal_itself_refuses_updates_and_deletes(path: Path) -> None:
    db = sqlite3.connect(path)
    for statement in ("UPDATE journal SET body = '{}'", "DELETE FROM journal"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            db.execute(statement)
    db.close()


def rewrite(path: Path, keep: int, **changed: Any) -> None:
    """A forger who recomputes every hash: changes entry 4, or cuts the end off."""
    entries = rows(path)[:keep]
    head = GENESIS
    statements: list[tuple[str, tuple[Any, ...]]] = [("DELETE FROM journal", ())]
    for number, kind, key, refers, body, _ in entries:
        new = changed.get("body", body) if number == changed.get("number") else body
        head = entry_hash(head, number, kind, key, refers, new)
        statements.append(
            ("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", (number, kind, key, refers, new, head))
        )
    raw(path, *statements)


def test_cutting_the_end_keeps_the_chain_but_not_the_head(path: Path) -> None:
    with Ledger.open(path) as ledger:
        head, entries = ledger.head(), len(ledger)
    rewrite(path, keep=entries - 1)
    with Ledger.open(path) as ledger:
        assert ledger.head() != head
        assert len(ledger) == entries - 1


def test_a_rewritten_ledger_with_a_charge_outside_its_plan_is_refused(path: Path) -> None:
    body = rows(path)[3][4].replace("50.0", "0.05")
    rewrite(path, keep=100, number=4, body=body)
    with pytest.raises(LedgerDamaged, match="budget-exceeded") as caught:
        Ledger.open(path)
    assert caught.value.entry == 4
    with Ledger.open(path, read_only=True) as ledger:
        assert [number for number, _ in ledger.violations] == [4]


def test_entries_that_make_no_sense_are_located(path: Path) -> None:
    for body in ("{}", "[]", "no json", '{"version":99}'):
        rewrite(path, keep=100, number=4, body=body)
        with pytest.raises(LedgerDamaged, match="entry 4") as caught:
            Ledger.open(path)
        assert caught.value.entry == 4


def test_a_changed_message_is_never_sent(path: Path) -> None:
    raw(path, ("UPDATE outbox SET message = ?", (b"forged",)))
    with Ledger.open(path) as ledger, pytest.raises(LedgerDamaged, match="was changed"):
        ledger.message(ledger.outbox()[0])


def test_files_that_are_no_ledgers(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    for content in (b"", b"hello", b"SQLite format 3\x00" + b"\x00" * 200):
        path.write_bytes(content)
        for read_only in (False, True):
            with pytest.raises(UserError):
                Ledger.open(path, read_only=read_only)
        assert path.read_bytes() == content
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(LedgerDamaged, match="some other SQLite file"):
        Ledger.open(path)
    assert path.read_bytes() == before  # a foreign file is left as it was


def test_a_run_that_never_began(tmp_path: Path) -> None:
    Journal.create(tmp_path / "x.sqlite").close()
    with pytest.raises(LedgerDamaged, match="never began"):
        Ledger.open(tmp_path / "x.sqlite")


def test_flipped_bytes_never_change_what_is_read(path: Path) -> None:
    """Damage anywhere in the file is refused, or lies where nothing is read."""
    original, expected = path.read_bytes(), rows(path)
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(original)
        for _ in range(4):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            with Ledger.open(path, read_only=True) as ledger:
                ledger.verify_chain()
                for token in ledger.outbox():
                    ledger.message(token)
                assert ledger.spent("a") == [release("a"), release("a", 1)]
            assert [row[:6] for row in rows(path)] == expected
        except UserError:
            refused += 1
    assert refused > 20


def test_a_read_only_folder_can_be_read(path: Path) -> None:
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        with Ledger.open(path, read_only=True) as ledger:
            assert ledger.plans == {"a": plan("a"), "b": plan("b")}
    finally:
        path.parent.chmod(0o700)
