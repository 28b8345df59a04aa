"""An append-only, hash-chained journal in one SQLite file: the storage under the ledger.

Entry n holds sha256(hash of entry n−1 ‖ canonical JSON of its number, kind, key, reference and body). SQLite runs
in WAL mode with `synchronous=FULL`, so that a committed transaction survives a kill and a power cut, and every
writer takes the write lock first (`BEGIN IMMEDIATE`), so that two processes cannot interleave.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from modicum.errors import UserError
from modicum.privacy.durable import sync_folder

APPLICATION_ID = 0x6D6F6463  # "modc"
FORMAT = 2  # since format 2 the first entry says so too, inside the chain
READABLE = (1, FORMAT)
BUSY_SECONDS = 30.0
AT_ONCE = 500  # values in one lookup: SQLite has always taken 999
GENESIS = "0" * 64

TABLES = {
    "journal": """CREATE TABLE journal (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    key TEXT UNIQUE,
    refers INTEGER UNIQUE,
    body TEXT NOT NULL,
    hash TEXT NOT NULL
)""",
    "outbox": "CREATE TABLE outbox (entry INTEGER PRIMARY KEY, round INTEGER NOT NULL, message BLOB NOT NULL)",
}
TRIGGERS = {
    "journal_keeps_every_field": """CREATE TRIGGER journal_keeps_every_field BEFORE UPDATE ON journal
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END""",
    "journal_keeps_every_entry": """CREATE TRIGGER journal_keeps_every_entry BEFORE DELETE ON journal
BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END""",
}
SCHEMA = f"""
BEGIN IMMEDIATE;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
{";".join([*TABLES.values(), *TRIGGERS.values()])};
COMMIT;
"""

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)  # the second where SQLite's own complaint is no text


class LedgerDamaged(UserError):  # noqa: N818
    """The file is no ledger, or not the one that was written. `entry` is the first entry that is wrong."""

    def __init__(self, message: str, entry: int | None = None) -> None:
        super().__init__(message)
        self.entry = entry


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    number: int
    kind: str
    key: str | None
    refers: int | None
    body: str
    hash: str

    @property
    def value(self) -> dict[str, Any]:
        """The body as an object; anything else is an error."""
        value = json.loads(self.body)
        if not isinstance(value, dict):
            raise ValueError("an entry's body is an object")
        return value


def canonical(value: Any) -> str:
    """One text per value: sorted keys, no spaces, shortest floats that read back the same; no NaN or infinity."""
    try:
        text = _CANONICAL.encode(value)
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            "a ledger holds text only: use names of ordinary characters, this one is not text"
        ) from None
    except ValueError:
        raise UserError("a ledger holds finite numbers only: give finite noise, bounds and budgets") from None
    return text


def entry_hash(before: str, number: int, kind: str, key: str | None, refers: int | None, body: str) -> str:
    """SHA-256 over the hash before it and the entry's own fields: the chain's link."""
    return hashlib.sha256((before + canonical([number, kind, key, refers, body])).encode()).hexdigest()


class OnJournal:
    """What keeps its entries in a journal, and is open as long as that is."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def close(self) -> None:
        """Close the file; what was written stays, and other processes that hold it open are not disturbed."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _closed_on_failure(self) -> Iterator[Self]:
        """While it is read for the first time."""
        try:
            yield self
        except BaseException:
            self.close()
            raise


class Journal:
    """The open file. `number` and `head` are the last entry read or written through this object.

    What entries may say is not its business: whoever uses it has a grammar of their own.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, format: int = FORMAT) -> None:
        self._db = connection
        self.path = path
        self.format = format
        self.number = 0
        self.head = GENESIS

    @classmethod
    def create(cls, path: Path) -> Journal:
        """A new file, readable by its owner alone; one that exists is refused."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            raise UserError(
                f"{path} exists already: open it to continue that run, or choose another folder"
            ) from None
        except OSError as error:
            raise UserError(f"cannot create the ledger {path}: {error.strerror}") from None
        journal = cls(_connect(f"{path.absolute().as_uri()}?mode=rw"), path)
        _make_durable(journal._db)
        journal._db.executescript(SCHEMA)
        sync_folder(path.parent)
        return journal

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Journal:
        """An existing file of a format that is known here; `read_only` never adds to it."""
        if not path.is_file():
            raise UserError(f"no ledger at {path}: give the path of a run folder or of its ledger.sqlite")
        uri = path.absolute().as_uri()
        try:
            try:
                connection = _connect(f"{uri}?mode={'ro' if read_only else 'rw'}")
                version = _check_format(connection, path)
                if not read_only:
                    _make_durable(connection)
            except sqlite3.OperationalError:
                # A folder that cannot be written to, with no log left to replay: the file alone is the ledger.
                if not read_only or path.with_name(path.name + "-wal").exists():
                    raise
                connection = _connect(f"{uri}?mode=ro&immutable=1")
                version = _check_format(connection, path)
        except _DAMAGE as error:
            raise LedgerDamaged(f"{path} is not a readable ledger: {error}") from None
        return cls(connection, path, version)

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self, read: Callable[[Entry], None]) -> Iterator[None]:
        """All or nothing, durable on return. Starts by reading what other processes wrote."""
        with self.readable():
            self._db.execute("BEGIN IMMEDIATE")
        try:
            for entry in self.news():
                read(entry)
            number, head = self.number, self.head
            try:
                yield
                with self.readable():
                    self._db.execute("COMMIT")
            except BaseException:
                self.number, self.head = number, head
                raise
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Turns SQLite's complaints into one line for the user."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UserError(f"the ledger {self.path} cannot be used now: {error}") from None
        except _DAMAGE as error:
            raise LedgerDamaged(f"the ledger {self.path} is damaged: {error}") from None

    def append(
        self, kind: str, value: dict[str, Any] | str, key: str | None = None, refers: int | None = None
    ) -> Entry:
        """Adds the next entry, whose body may be canonical text already; only inside a transaction."""
        number, body = self.number + 1, value if isinstance(value, str) else canonical(value)
        digest = entry_hash(self.head, number, kind, key, refers, body)
        self._db.execute(
            "INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", (number, kind, key, refers, body, digest)
        )
        self.number, self.head = number, digest
        return Entry(number, kind, key, refers, body, digest)

    def news(self) -> Iterator[Entry]:
        """Entries not read yet, each checked against the chain. One that its reader refuses stays unread."""
        with self.readable():
            rows = self._db.execute("SELECT * FROM journal WHERE number > ? ORDER BY number", (self.number,))
            for row in rows:
                entry = Entry(*row)
                self._check(entry)
                yield entry
                self.number, self.head = entry.number, entry.hash

    def by_key(self, key: str) -> Entry | None:
        """The one entry with this key, or None."""
        return self._one("SELECT * FROM journal WHERE key = ?", key)

    def referring_to(self, number: int) -> Entry | None:
        """The one entry that refers to another, such as a reservation's settlement, or None."""
        return self._one("SELECT * FROM journal WHERE refers = ?", number)

    def entry(self, number: int) -> Entry | None:
        """The entry of this number, counted from 1, or None."""
        return self._one("SELECT * FROM journal WHERE number = ?", number)

    def by_keys(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries that have one of these keys, by key."""
        return {str(entry.key): entry for entry in self._some("key", keys)}

    def entries(self, numbers: Sequence[int]) -> dict[int, Entry]:
        """The entries of these numbers, by number."""
        return {entry.number: entry for entry in self._some("number", numbers)}

    def referring(self, numbers: Sequence[int]) -> dict[int, Entry]:
        """The entries that refer to one of these, by the number that they refer to."""
        return {int(entry.refers or 0): entry for entry in self._some("refers", numbers)}

    def _some(self, column: str, values: Sequence[str] | Sequence[int]) -> Iterator[Entry]:
        for start in range(0, len(values), AT_ONCE):
            some = values[start : start + AT_ONCE]
            query = f"SELECT * FROM journal WHERE {column} IN ({','.join('?' * len(some))})"
            with self.readable():
                yield from (Entry(*row) for row in self._db.execute(query, some))

    def with_hash(self, digits: str) -> Entry | None:
        """The first entry whose hash begins with these digits."""
        with self.readable():
            query = "SELECT * FROM journal WHERE substr(hash, 1, ?) = ? ORDER BY number"
            row = self._db.execute(query, (len(digits), digits)).fetchone()
        return None if row is None else Entry(*row)

    def of_kind(self, kind: str) -> Iterator[Entry]:
        """All entries of one kind, in order."""
        with self.readable():
            for row in self._db.execute("SELECT * FROM journal WHERE kind = ? ORDER BY number", (kind,)):
                yield Entry(*row)

    def under(self, prefix: str) -> list[Entry]:
        """Entries whose key begins with a prefix, in order."""
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        query = "SELECT * FROM journal WHERE key >= ? AND key < ? ORDER BY number"
        with self.readable():
            return [Entry(*row) for row in self._db.execute(query, (prefix, after))]

    def unreferred(self, kind: str) -> list[Entry]:
        """Entries of a kind that no later entry refers to."""
        query = (
            "SELECT * FROM journal AS a WHERE kind = ? AND NOT EXISTS "
            "(SELECT 1 FROM journal AS b WHERE b.refers = a.number) ORDER BY number"
        )
        with self.readable():
            return [Entry(*row) for row in self._db.execute(query, (kind,))]

    def put_message(self, entry: int, round: int, message: bytes) -> None:
        """Keep a message in the outbox, under its reservation's number and round."""
        self._db.execute("INSERT INTO outbox VALUES (?, ?, ?)", (entry, round, message))

    def message(self, entry: int) -> bytes | None:
        """The kept message of a reservation, or None."""
        with self.readable():
            row = self._db.execute("SELECT message FROM outbox WHERE entry = ?", (entry,)).fetchone()
        return None if row is None else bytes(row[0])

    def kept_messages(self) -> list[int]:
        """Numbers of the reservations whose messages are in the outbox."""
        with self.readable():
            return [int(n) for (n,) in self._db.execute("SELECT entry FROM outbox ORDER BY entry")]

    def drop_messages(self, entries: list[int]) -> None:
        """Forget the messages of these reservations; the entries stay."""
        self._db.executemany("DELETE FROM outbox WHERE entry = ?", [(n,) for n in entries])

    def drop_messages_before(self, round: int) -> bool:
        """Forget the messages of all earlier rounds; the entries stay. False where there were none."""
        return self._db.execute("DELETE FROM outbox WHERE round < ?", (round,)).rowcount > 0

    def empty_log(self) -> None:
        """Take the write-ahead log into the file and cut it: it holds what was dropped. Not while others read."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def check_indexes(self) -> None:
        """SQLite's own check: the chain guards what entries say, this that lookups find them."""
        with self.readable():
            (answer,) = self._db.execute("PRAGMA integrity_check(journal)").fetchone()
        if answer != "ok":
            raise LedgerDamaged(f"the ledger {self.path} is damaged: {' '.join(str(answer).split())}")

    def _one(self, query: str, value: str | int) -> Entry | None:
        with self.readable():
            row = self._db.execute(query, (value,)).fetchone()
        return None if row is None else Entry(*row)

    def _check(self, entry: Entry) -> None:
        expected = self.number + 1
        if entry.number != expected:
            raise LedgerDamaged(f"the ledger {self.path} is damaged: entry {expected} is missing", expected)
        try:
            digest = entry_hash(self.head, entry.number, entry.kind, entry.key, entry.refers, entry.body)
        except (TypeError, ValueError):
            digest = ""
        if digest != entry.hash:
            raise LedgerDamaged(f"the ledger {self.path} is damaged: entry {expected} was changed", expected)


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = _text
    return connection


def _text(raw: bytes) -> str:
    """Bytes that are no text stay recognisable, so that the chain check can name their entry."""
    return raw.decode(errors="surrogateescape")


def _make_durable(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")  # messages that were pruned must not stay in free pages


def _check_format(connection: sqlite3.Connection, path: Path) -> int:
    """The format that the file says it has, once its tables and triggers are found to be ours."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise LedgerDamaged(f"{path} is not a ledger: it is some other SQLite file")
    if version not in READABLE:
        known = " and ".join(str(number) for number in READABLE)
        raise UserError(f"{path} has ledger format {version}, and this version reads formats {known}")
    things = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    if {name: sql for kind, name, sql in things if kind == "table"} != TABLES:
        raise LedgerDamaged(f"{path} is not a readable ledger: its tables are not those of a ledger")
    for kind, name, sql in things:  # a trigger of somebody else could drop a charge as it is written
        if kind != "table" and sql is not None and TRIGGERS.get(name) != sql:
            raise LedgerDamaged(f"{path} is not a readable ledger: it holds a {kind} of somebody else, {name!r}")
    return int(version)
