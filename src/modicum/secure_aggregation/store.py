"""What a client has said, on disk before it is sent: after any crash it says the same again, or nothing."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from modicum.errors import UserError
from modicum.secure_aggregation.terms import ProtocolError, Step


@dataclass(frozen=True)
class Entry:
    """One step of one round: digest of what was asked, what later steps need (secret), and the answer."""

    request: bytes
    state: bytes
    message: bytes


class Store(Protocol):
    """Durable memory of one client in one run."""

    def read(self, round: int, step: Step) -> Entry | None:
        """What was written, if anything was."""

    def write(self, round: int, step: Step, entry: Entry, *, erase: bool = False) -> None:
        """Keep an entry for good: on disk when this returns. A second one for the same step is refused.

        With `erase`, the round's secrets (every `state`) are destroyed in the same transaction.
        """

    def latest(self) -> int | None:
        """The highest round that has an entry."""

    def forget(self, before: int) -> None:
        """Destroy all rounds before this one."""


def _twice(round: int, step: Step) -> ProtocolError:
    return ProtocolError(f"round {round}, {step.name}: already answered, and nothing is answered twice")


class MemoryStore:
    """For simulations and tests: durable as long as the object is."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Step], Entry] = {}

    def read(self, round: int, step: Step) -> Entry | None:
        return self._entries.get((round, step))

    def write(self, round: int, step: Step, entry: Entry, *, erase: bool = False) -> None:
        if (round, step) in self._entries:
            raise _twice(round, step)
        self._entries[round, step] = entry
        if erase:
            for (r, s), e in self._entries.items():
                if r == round:
                    self._entries[r, s] = Entry(e.request, b"", e.message)

    def latest(self) -> int | None:
        return max((r for r, _ in self._entries), default=None)

    def forget(self, before: int) -> None:
        self._entries = {k: e for k, e in self._entries.items() if k[0] >= before}


class SqliteStore:
    """One file for one client, known by its signing key, in one run.

    Never begin a second file for the same run: it would sign twice.

    A rollback journal with `secure_delete`, not a write-ahead log: what is erased is overwritten in the file. On
    storage that keeps old blocks (snapshots, flash) only the medium's own encryption erases. The file holds the
    secrets of rounds under way: it is created readable by its owner alone, and SQLite gives its journal the same
    mode.
    """

    def __init__(self, path: str | Path, run: str, public_key: bytes) -> None:
        owner = public_key + run.encode()
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise UserError(f"{path} cannot be used as a secure aggregation store: {error.strerror}") from None
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            for pragma in ("journal_mode=DELETE", "synchronous=EXTRA", "secure_delete=ON", "busy_timeout=10000"):
                self._db.execute(f"PRAGMA {pragma}")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute("CREATE TABLE IF NOT EXISTS owner (name BLOB NOT NULL)")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS said (round INTEGER, step INTEGER, request BLOB NOT NULL, "
                    "state BLOB NOT NULL, message BLOB NOT NULL, PRIMARY KEY (round, step))"
                )
                if self._db.execute("SELECT count(*) FROM owner").fetchone() == (0,):
                    self._db.execute("INSERT INTO owner VALUES (?)", (owner,))
                names = self._db.execute("SELECT name FROM owner").fetchall()
        except sqlite3.Error as error:
            self._db.close()
            raise UserError(f"{path} cannot be used as a secure aggregation store: {error}") from None
        if names != [(owner,)]:
            self._db.close()
            raise UserError(f"{path} belongs to another run or client: use the file of this run")

    def read(self, round: int, step: Step) -> Entry | None:
        query = "SELECT request, state, message FROM said WHERE round = ? AND step = ?"
        row = self._db.execute(query, (round, int(step))).fetchone()
        return None if row is None else Entry(*row)

    def write(self, round: int, step: Step, entry: Entry, *, erase: bool = False) -> None:
        row = (round, int(step), entry.request, entry.state, entry.message)
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute("INSERT INTO said VALUES (?, ?, ?, ?, ?)", row)
                if erase:
                    self._db.execute("UPDATE said SET state = x'' WHERE round = ?", (round,))
        except sqlite3.IntegrityError:
            raise _twice(round, step) from None

    def latest(self) -> int | None:
        latest: int | None = self._db.execute("SELECT max(round) FROM said").fetchone()[0]
        return latest

    def forget(self, before: int) -> None:
        self._db.execute("DELETE FROM said WHERE round < ?", (before,))

    def close(self) -> None:
        """Close the file."""
        self._db.close()
