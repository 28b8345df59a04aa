"""The account of one dataset: a lifetime grant, and what each run has drawn from it, record by record (R15).

A folder of its own that outlasts any run: `account.sqlite`, a hash-chained journal like a ledger's, and
`account.key`, the secret under which records are digested. A run draws its full price before it may reserve
anything; a draw is one transaction, known by the run's name, and is never given back. The account also remembers
how far each run's ledger had come, so that a ledger that was lost or put back to an earlier state is noticed.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from modicum.errors import UserError
from modicum.privacy.ledger.journal import Entry, Journal, LedgerDamaged, canonical
from modicum.privacy.lifetime import DrawRefused, Filter, Lifetime
from modicum.privacy.lifetime.files import FILE, KEY, alone, exists, finish_key, key_mark, new_key, read_key, sync
from modicum.privacy.lifetime.spending import Digests, Identity, Spending, fingerprint
from modicum.privacy.plan import PrivacyPlan

FORMAT = 2


@dataclass(frozen=True)
class Draw:
    """What one run drew: its plan's full price, from each record of its table."""

    run: str
    agreement: str  # digest of what was agreed, by which the run is told from another of the same name
    plan: PrivacyPlan
    cost: float  # in the filter's currency; ∞ where nothing is promised
    records: int
    table: str  # fingerprint of the records
    at: int  # seconds since 1970
    number: int  # of its entry
    hash: str


@dataclass(frozen=True)
class Mark:
    """How far a run's ledger had come when the account last heard of it."""

    entries: int
    head: str


class DatasetAccount:
    """The open account. Several processes may hold it; draws are decided under the file's write lock."""

    def __init__(self, journal: Journal, folder: Path, key: bytes | None) -> None:
        """Use `start` or `open`."""
        self._journal = journal
        self.folder, self.key = folder, key
        self.id = ""
        self.draws: dict[str, Draw] = {}
        self.marks: dict[str, Mark] = {}
        self._spending: tuple[int, str] | None = None  # the entry that holds what was spent, and its digest

    @classmethod
    def start(
        cls, folder: Path, lifetime: Lifetime, identity: Identity, column: str | None = None
    ) -> DatasetAccount:
        """Open the account of this folder, or begin it with this grant where there is none.

        `column` names the ids, where records are known by them.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with alone(folder):
                if not exists(folder):
                    _begin(folder, lifetime, identity, column)
                finish_key(folder)
        except OSError as error:
            raise UserError(f"cannot keep an account in {folder}: {error.strerror}") from None
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path, *, read_only: bool = False) -> DatasetAccount:
        """An account that was begun, its chain checked. Read-only works without the key: to look, not to draw."""
        if not exists(folder):
            raise UserError(f"no account in {folder}: the silo's first run begins it")
        key = None if read_only and not (folder / KEY).exists() else read_key(folder)
        account = cls(Journal.open(folder / FILE, read_only=read_only), folder, key)
        try:
            for entry in account._journal.news():
                account._read(entry)
            account._refuse_unusable()
        except BaseException:
            account.close()
            raise
        return account

    def close(self) -> None:
        """Close the file; what was drawn stays drawn."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def entries(self) -> int:
        """How many entries the journal has."""
        return self._journal.number

    @property
    def head(self) -> str:
        """Hash of the journal's last entry."""
        return self._journal.head

    def holds(self, number: int, hash: str) -> bool:
        """Whether an entry that somebody remembers is still here."""
        entry = self._journal.entry(number)
        return entry is not None and entry.hash == hash

    def secret(self) -> bytes:
        """The key of the records' digests; refused where it is lost."""
        if self.key is None:
            raise UserError(
                f"{self.folder / KEY} is missing: without it records cannot be recognised; put it back"
            )
        return self.key

    def check(self, lifetime: Lifetime, identity: Identity, column: str | None = None) -> None:
        """A grant is fixed when the account is opened, and so is what identifies a record."""
        if lifetime != self.lifetime:
            raise UserError(
                f"the account in {self.folder} was opened with {_shown(self.lifetime)} and the silo's file says "
                f"{_shown(lifetime)}: a lifetime grant never changes, put the first one back under [account]"
            )
        if (identity, column) != (self.identity, self.column):
            raise UserError(
                f"the account in {self.folder} knows records by their {_known_by(self.identity, self.column)} and "
                f"the silo's file says {_known_by(identity, column)}: all would count as new, put id_column under "
                "[data] back as it was"
            )

    def spending(self) -> Spending:
        """What each record has drawn so far."""
        if self._spending is None:
            return Spending.nothing()
        number, digest = self._spending
        blob = self._journal.message(number)
        if blob is None or hashlib.sha256(blob).hexdigest() != digest:
            raise LedgerDamaged(f"the account in {self.folder} is damaged: its records were changed", number)
        return Spending.unpack(blob)

    def left(self, table: Digests) -> float:
        """The share of the grant that the most-spent record of a table still has."""
        return max(0.0, 1 - self.share(self.spending().most(table, self.identity)))

    def afford(self, plan: PrivacyPlan, table: Digests) -> None:
        """Raises `DrawRefused` where a new run with this plan could not be drawn; draws nothing."""
        self._refuse_overdraft(
            "the next run", self.lifetime.price(plan), self.spending().most(table, self.identity)
        )

    def share(self, cost: float) -> float:
        """A cost as a share of the cap; nothing is ever used up where the cap is ∞."""
        return 0.0 if math.isinf(self.lifetime.cap) else cost / self.lifetime.cap

    def draw(self, run: str, agreement: str, plan: PrivacyPlan, table: Digests) -> Draw:
        """Draws a run's full price from every record of its table, durably, or raises `DrawRefused`.

        Asking again for the same run, agreement and records draws nothing. No later call gives anything back.
        """
        mark, cost = fingerprint(self.secret(), table), self.lifetime.price(plan)
        with self._journal.transaction(self._read):
            known = self.draws.get(run)
            if known is not None:
                self._check_same(known, agreement, plan, mark)
                return known
            before = self.spending()
            self._refuse_overdraft(f"run {run!r}", cost, before.most(table, self.identity))
            blob = before.after(table, cost, self.identity).pack()
            value = {
                "run": run,
                "agreement": agreement,
                "plan": plan.to_dict(),
                "cost": _finite(cost),
                "records": len(table),
                "table": mark,
                "at": int(time.time()),
                "spending": hashlib.sha256(blob).hexdigest(),
            }
            entry = self._journal.append("draw", value, key=canonical(["draw", run]))
            self._journal.put_message(entry.number, 0, blob)
            self._journal.drop_messages([n for n in self._journal.kept_messages() if n != entry.number])
        self._read(entry)
        return self.draws[run]

    def remember(self, run: str, entries: int, head: str) -> None:
        """Notes how far a run's ledger has come. Refuses where another process has noted more since."""
        seen, now = self.marks.get(run), Mark(entries, head)
        if seen == now:
            return
        with self._journal.transaction(self._read):
            if self.marks.get(run) != seen:
                raise UserError(f"another silo takes part in run {run!r} with this account: stop one of the two")
            entry = self._journal.append("mark", {"run": run, "entries": entries, "head": head})
        self._read(entry)

    def check_ledger(self, run: str, ledger: Path) -> None:
        """Refuses a ledger that is gone, or that lacks what the account remembers of it."""
        mark = self.marks.get(run)
        if mark is None:
            return
        advice = f"put the folder of run {run!r} back as it was, or leave that run and join a new one"
        if not ledger.exists():
            raise UserError(
                f"{ledger} is missing, and the account remembers {mark.entries} entries of it: {advice}"
            )
        with Journal.open(ledger, read_only=True) as journal:
            entry = journal.entry(mark.entries)
        if entry is None or entry.hash != mark.head:
            raise UserError(
                f"{ledger} is an older copy, or not the ledger that the account remembers at entry "
                f"{mark.entries}: {advice}"
            )

    def statement(self, run: str) -> dict[str, Any]:
        """For a certificate: the cap that holds over all runs (R3), and this run's draw. Nothing about records."""
        lifetime, cost = self.lifetime, self.draws[run].cost
        return {
            "kept": True,
            "id": self.id,
            **lifetime.to_dict(),
            "cap": _finite(lifetime.cap),
            "drawn": _finite(cost),
            "head": self.head,
            "entries": self.entries,
            "sentence": lifetime.sentence(),
        }

    def overview(self) -> dict[str, Any]:
        """Grant and draws, as plain values."""
        draws = [
            {
                "run": d.run,
                "date": time.strftime("%Y-%m-%d", time.gmtime(d.at)),
                "records": d.records,
                "budget": _finite(d.plan.budget),
                "cost": _finite(d.cost),
                "share": self.share(d.cost),
            }
            for d in self.draws.values()
        ]
        return {
            "id": self.id,
            **self.lifetime.to_dict(),
            "cap": _finite(self.lifetime.cap),
            "identity": str(self.identity),
            "sentence": self.lifetime.sentence(),
            "draws": draws,
            "entries": self.entries,
            "head": self.head,
        }

    def _refuse_overdraft(self, who: str, cost: float, spent: float) -> None:
        if spent + cost <= self.lifetime.cap:
            return
        if self.lifetime.filter is Filter.ONE_RUN:
            raise DrawRefused(
                f"records of this table took part in an earlier run, or cannot be told from such, and "
                f"{self.folder} was opened for one run, without a lifetime grant: {who} needs other records "
                "(see docs/silo-account.md)"
            )
        raise DrawRefused(
            f"{who} asks {percent(self.share(cost))} of the lifetime grant ({_shown(self.lifetime)}) and "
            f"{percent(max(0.0, 1 - self.share(spent)), up=False)} is left for the most-spent of its records: "
            "plan fewer rounds or a smaller budget, or leave those records out"
        )

    def _check_same(self, known: Draw, agreement: str, plan: PrivacyPlan, table: str) -> None:
        if (known.agreement, known.plan) != (agreement, plan):
            raise DrawRefused(f"run {known.run!r} drew on this account with other terms: a run has one draw")
        if known.table != table:
            raise DrawRefused(
                f"the records have changed since run {known.run!r} drew on this account: put them back as they "
                "were, or leave that run and join a new one"
            )

    def _read(self, entry: Entry) -> None:
        try:
            value = entry.value
            match entry.kind:
                case "account" if entry.number == 1:
                    self._read_first(value)
                case "draw" if value["run"] not in self.draws:
                    self._read_draw(entry, value)
                case "mark" if value["run"] in self.draws:
                    self.marks[value["run"]] = Mark(int(value["entries"]), str(value["head"]))
                case _:
                    raise UserError(f"an entry of kind {entry.kind!r} does not belong here")
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerDamaged(
                f"{self._journal.path} is no account that can be understood: entry {entry.number}: {error}",
                entry.number,
            ) from None

    def _read_first(self, value: dict[str, Any]) -> None:
        if value["format"] != FORMAT:
            raise UserError(f"its format is {value['format']!r} and this version reads {FORMAT}")
        self.id, self._key_mark = str(value["id"]), str(value["key"])
        self.lifetime, self.identity = Lifetime.from_dict(value["lifetime"]), Identity(value["identity"])
        self.column = None if value["column"] is None else str(value["column"])

    def _read_draw(self, entry: Entry, value: dict[str, Any]) -> None:
        plan = PrivacyPlan.from_dict(value["plan"])
        cost = math.inf if value["cost"] is None else float(value["cost"])
        run, records = str(value["run"]), int(value["records"])
        self.draws[run] = Draw(
            run, str(value["agreement"]), plan, cost, records, str(value["table"]), int(value["at"]),
            entry.number, entry.hash,
        )  # fmt: skip
        self._spending = entry.number, str(value["spending"])

    def _refuse_unusable(self) -> None:
        if not self.id:
            raise LedgerDamaged(f"{self._journal.path} is no account: it has no entry")
        if self.key is not None and key_mark(self.key) != self._key_mark:
            raise UserError(f"{self.folder / KEY} is not the key of this account: put the right one back")


def _begin(folder: Path, lifetime: Lifetime, identity: Identity, column: str | None) -> None:
    """Made under another name and moved into place whole, so that a crash leaves an account or none."""
    draft, key = folder / f"{FILE}.new", new_key(folder)
    for suffix in ("", "-wal", "-shm"):
        draft.with_name(draft.name + suffix).unlink(missing_ok=True)
    value = {
        "format": FORMAT,
        "id": secrets.token_hex(8),
        "lifetime": lifetime.to_dict(),
        "identity": str(identity),
        "column": column,
        "key": key_mark(key),
    }
    with Journal.create(draft) as journal, journal.transaction(lambda _: None):
        journal.append("account", value)
    os.replace(draft, folder / FILE)  # closing has moved the log into the file
    sync(folder)


def _known_by(identity: Identity, column: str | None) -> str:
    return str(identity) if column is None else f"{identity} in {column!r}"


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def percent(share: float, *, up: bool = True) -> str:
    """A share of a grant for people: what is asked is rounded up, what is left down."""
    if math.isinf(share):
        return "more than all"
    return f"{(math.ceil if up else math.floor)(share * 1000) / 10:g}%"


def _shown(lifetime: Lifetime) -> str:
    if lifetime.budget is None:
        return f"one run for each {lifetime.unit}, {lifetime.adjacency}"
    order = "" if lifetime.order is None else f" at α* = {lifetime.order:g}"
    return (
        f"ε = {lifetime.budget:g}, δ = {lifetime.delta:g} per {lifetime.unit}, {lifetime.adjacency}, "
        f"{lifetime.filter} filter{order}"
    )
