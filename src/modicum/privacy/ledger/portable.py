"""A ledger's entries as plain values, for who has no ledger: all of them, or all but the digests of messages."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.privacy.ledger.grammar import KINDS
from modicum.privacy.ledger.journal import Journal

MOST = 1_000_000  # entries

Entries = list[list[Any]]
"""[kind, key, refers, body] of each, in order."""


def entries_of(path: Path, *, digests: bool) -> Entries:
    """What a ledger says. Without `digests` no settlement is in it, and its chain is another one."""
    with Journal.open(path, read_only=True) as journal:
        return [[e.kind, e.key, e.refers, e.body] for e in journal.news() if digests or e.kind != "settle"]


def rebuild(entries: Any, path: Path) -> None:
    """A ledger of these entries in a new file; whether they make sense is for its reader.

    Raises:
        UserError: They are no entries.
    """
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST or not all(map(_is_entry, entries)):
        raise UserError("its entries are not a ledger's")
    try:
        with Journal.create(path) as journal, journal.transaction(lambda _: None):
            for kind, key, refers, body in entries:
                journal.append(kind, body, key, refers)
    except (sqlite3.Error, ValueError, OverflowError) as error:
        raise UserError(f"its entries are not a ledger's: {error}") from None


def _is_entry(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    kind, key, refers, body = value
    return (
        kind in KINDS
        and isinstance(body, str)
        and (key is None or isinstance(key, str))
        and (refers is None or type(refers) is int)
    )
