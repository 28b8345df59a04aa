"""Somebody with full access to a run folder: edits entries at will, rehashes the chain, certifies anew."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.privacy.ledger.grammar import KINDS
from modicum.privacy.ledger.journal import FORMAT, GENESIS, TRIGGERS, canonical, entry_hash


@dataclass(frozen=True)
class Row:
    """An entry without number and hash, which follow from where it stands."""

    kind: str
    key: str | None
    refers: int | None
    body: str

    @property
    def value(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def saying(self, value: dict[str, Any]) -> Row:
        return replace(self, body=json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))

    def keyed(self) -> Row:
        """With the key that follows from its body, where one does."""
        try:
            kind = KINDS[self.kind]
            return replace(self, key=kind.key(kind.says.from_dict(self.value)))
        except (ValueError, KeyError, TypeError, AttributeError):
            return self


Rows = list[Row]


def rows_of(path: Path) -> Rows:
    with closing(sqlite3.connect(path)) as db:
        return [Row(*row) for row in db.execute("SELECT kind, key, refers, body FROM journal ORDER BY number")]


def head_of(rows: Rows) -> str:
    head = GENESIS
    for number, row in enumerate(rows, 1):
        head = entry_hash(head, number, row.kind, row.key, row.refers, row.body)
    return head


def write(path: Path, rows: Rows, format: int = FORMAT) -> None:
    """Replaces every entry, with a chain that is whole; raises `sqlite3.IntegrityError` where the file refuses."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous = OFF")  # a forger is in a hurry
        with suppress(sqlite3.OperationalError):  # somebody has it open
            db.execute("PRAGMA journal_mode = MEMORY")
        db.execute("BEGIN")
        for name in TRIGGERS:
            db.execute(f"DROP TRIGGER IF EXISTS {name}")
        db.execute("DELETE FROM journal")
        head = GENESIS
        for number, row in enumerate(rows, 1):
            head = entry_hash(head, number, row.kind, row.key, row.refers, row.body)
            values = (number, row.kind, row.key, row.refers, row.body, head)
            db.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", values)
        for statement in TRIGGERS.values():
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {format}")
        db.commit()


def forged(folder: Path, honest: Path, rows: Rows, format: int = FORMAT) -> Path:
    """A copy of a run folder with other entries; its certificate is still the old one."""
    shutil.copytree(honest, folder, dirs_exist_ok=True)
    write(folder / "ledger.sqlite", rows, format)
    return folder


def as_format_1(rows: Rows) -> Rows:
    """The same entries as they were written before the first one named the format and foreign parts."""
    value = rows[0].value
    del value["format"], value["foreign_parts"]
    return [rows[0].saying(value), *rows[1:]]


CRYPTOGRAPHIC = {
    "source": "cryptographic",
    "simulation": False,
    "sentence": "Noise and sampling coins come from the operating system's cryptographic generator.",
}


# One way of forging each. They take all entries (and those of another ledger) and return new ones.


def _of(rows: Rows, kind: str, rng: random.Random) -> Row:
    return rng.choice([row for row in rows if row.kind == kind] or rows)


def second_run(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    noise = rng.choice([CRYPTOGRAPHIC, rows[0].value["noise"]])
    run = rng.choice([rows[0].value["run"], "other"])
    return [*rows, rows[0].saying({**rows[0].value, "noise": noise, "run": run})]


def second_plan(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    """A cheaper plan, or one with room again, under no key, its own key or a made-up one."""
    old = _of(rows, "plan", rng)
    value = old.value
    for planned in value.get("releases", []):
        planned["noise_multiplier"] *= rng.choice([1, 1, 100])
        planned["count"] *= rng.choice([1, 10])
    if value.get("budget"):
        value["budget"] *= rng.choice([0.01, 1, 100])
    if rng.random() < 0.3:
        value.update(guard="gdp-filter", releases=[], order=None, budget=0.08)
    client = value.get("client", "a")
    key = rng.choice([None, old.key, canonical([client, ""]), f"{old.key} ", canonical([client, rng.random()])])
    return [*rows, replace(old.saying(value), key=key)]


def repeated(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    again = rng.choice(rows)
    key = rng.choice([again.key, None, f"{again.key}'"])
    refers = rng.choice([again.refers, None, len(rows)])
    return [*rows, replace(again, key=key, refers=refers)]


def reserved(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    """A reservation more: an honest one, or of an unknown client, with credit, or for nothing."""
    value = _of(rows, "reserve", rng).value
    value["round"] = rng.choice([7, 8, 9, -1])
    if rng.random() < 0.5:
        return [*rows, Row("reserve", None, None, "").saying(value).keyed()]
    value["client"] = rng.choice([value.get("client"), "nobody", "", None])
    value["count"] = rng.choice([1, 1, 0, -5, 0.5, True])
    row = Row("reserve", None, None, "").saying(value).keyed()
    return [*rows, rng.choice([row, row, replace(row, key=None), replace(row, refers=len(rows))])]


def settled(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    """A settlement more: of anything that there is or is not, settled or not."""
    to = rng.choice([rng.randint(1, len(rows)), 0, -1, None, len(rows) + 1, len(rows) + 2])
    value: dict[str, Any] = {"digest": rng.choice(["0" * 64, "none"]), "size": rng.choice([0, 5, -1])}
    return [*rows, Row("settle", None, to, "").saying(value)]


def invented(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    kind = rng.choice(["void", "reopen", "refund", "Plan", "run ", "", "grammar"])
    row = rng.choice(rows)
    return [*rows, replace(row, kind=kind, key=None, refers=rng.choice([None, rng.randint(1, len(rows))]))]


def moved(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    order = list(rows)
    order.insert(rng.randrange(len(rows)), order.pop(rng.randrange(len(rows))))
    return order


def dropped(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    """One entry less, with what refers to it; references to later ones follow."""
    gone = rng.randint(1, len(rows))
    kept = [row for number, row in enumerate(rows, 1) if number != gone and row.refers != gone]
    return [replace(row, refers=row.refers - 1) if (row.refers or 0) > gone else row for row in kept]


def cut(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    return rows[: rng.randint(1, len(rows))]


def spliced(rows: Rows, rng: random.Random, other: Rows) -> Rows:
    """The beginning of one ledger and the end, or a piece, of another."""
    first, second = rng.choice([(rows, other), (other, rows), (rows, rows)])
    start = rng.randrange(len(second))
    return [*first[: rng.randint(1, len(first))], *second[start : rng.randint(start + 1, len(second))]]


def continued(rows: Rows, rng: random.Random, other: Rows) -> Rows:
    """All of one ledger, then a piece of another."""
    start = rng.randrange(len(other))
    return [*rows, *other[start : rng.randint(start + 1, len(other))]]


def changed(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    """One field anywhere in one entry, with or without the key that would follow."""
    at = rng.randrange(len(rows))
    value = rows[at].value
    holder, name = rng.choice(_places(value))
    old = holder[name]
    if isinstance(old, bool):
        holder[name] = not old
    elif isinstance(old, int | float):
        holder[name] = rng.choice([old * 100, old / 100, old + 1, -old, 0, None, str(old)])
    elif isinstance(old, str):
        holder[name] = rng.choice(["cryptographic", "none", "gdp-filter", "client", "other", "", None, 1])
    elif rng.random() < 0.5 and isinstance(holder, dict):
        holder[f"{name}2"] = old
    else:
        holder[name] = None
    new = rows[at].saying(value)
    return [*rows[:at], new.keyed() if rng.random() < 0.5 else new, *rows[at + 1 :]]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, name) inside a JSON value."""
    names = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = [(value, name) for name in names]
    for name in names:
        if isinstance(value[name], dict | list):
            found += _places(value[name])
    return found


def repointed(rows: Rows, rng: random.Random, _: Rows) -> Rows:
    at = rng.randrange(len(rows))
    key = rng.choice([rows[at].key, None, rng.choice(rows).key, "x"])
    refers = rng.choice([rows[at].refers, None, rng.randint(0, len(rows))])
    return [*rows[:at], replace(rows[at], key=key, refers=refers), *rows[at + 1 :]]


Forgery = Callable[[Rows, random.Random, Rows], Rows]
APPENDING: tuple[Forgery, ...] = (second_run, second_plan, repeated, reserved, settled, invented, continued)
REWRITING: tuple[Forgery, ...] = (moved, dropped, cut, spliced, changed, repointed)


def forgery(rows: Rows, other: Rows, rng: random.Random) -> tuple[str, Rows]:
    """One to three of them in a row."""
    names = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        how = rng.choice(rng.choice([APPENDING, REWRITING]))
        with suppress(
            TypeError, KeyError, IndexError, ValueError, AttributeError
        ):  # an earlier one left nothing to work on
            rows = how(rows, rng, other)
            names.append(how.__name__)
    return ", ".join(names), rows
