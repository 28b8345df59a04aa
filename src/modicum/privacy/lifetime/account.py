"""The account of one dataset: a lifetime grant, and what each run has drawn from it, record by record (R15).

A folder of its own that outlasts any run: `account.sqlite`, a hash-chained journal like a ledger's, and
`account.key`, the secret under which records are digested. A run draws its full price before it may reserve
anything; a draw is one transaction, known by the run's name, and is never given back. From joining on, the same
price is held, which counts alike (`draws`). The account also remembers how far each run's ledger had come, so that
a ledger that was lost or put back to an earlier state is noticed.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np

from modicum.errors import UserError
from modicum.privacy.durable import sync_folder
from modicum.privacy.ledger.journal import Entry, Journal, LedgerDamaged, OnJournal, canonical
from modicum.privacy.lifetime import DrawRefused, Filter, Lifetime
from modicum.privacy.lifetime.draws import Draw, Mark, State, held, never_reserved
from modicum.privacy.lifetime.files import FILE, KEY, alone, exists, finish_key, key_mark, new_key, read_key
from modicum.privacy.lifetime.planning import largest
from modicum.privacy.lifetime.spending import Digests, Identity, Spending, fingerprint
from modicum.privacy.plan import PrivacyPlan

FORMAT = 2


class DatasetAccount(OnJournal):
    """The open account. Several processes may hold it; draws are decided under the file's write lock."""

    def __init__(self, journal: Journal, folder: Path, key: bytes | None) -> None:
        """Use `start` or `open`."""
        super().__init__(journal)
        self.folder, self.key = folder, key
        self.id = ""
        self.draws: dict[str, Draw] = {}  # by run, held or drawn; the last word on each
        self.marks: dict[str, Mark] = {}
        self._spending: tuple[int, str] | None = None  # the entry that holds what was spent, and its digest
        self._since: dict[int, Draw] = {}  # by the entry of their rows, in order: not in that entry yet

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
        with cls(Journal.open(folder / FILE, read_only=read_only), folder, key)._closed_on_failure() as account:
            for entry in account._journal.news():
                account._read(entry)
            account._refuse_unusable()
        return account

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

    def spending(self, lapsing: AbstractSet[str] = frozenset()) -> Spending:
        """What each record has drawn or holds.

        Runs count in the order in which they were held, whatever became of them since: which row may be an edited
        other one was known then. A hold that lapsed costs nothing, and no record more than before.

        Args:
            lapsing: Runs whose holds are counted as lapsed.
        """
        found = Spending.nothing() if self._spending is None else Spending.unpack(self._kept(*self._spending))
        for draw in self._since.values():
            free = not draw.counts or (draw.state is State.HELD and draw.run in lapsing)
            rows = np.frombuffer(self._kept(draw.rows, draw.rows_digest), "<u8").astype(np.uint64)
            found = found.after(rows, 0.0 if free else draw.cost, self.identity)
        return found

    def _kept(self, number: int, digest: str) -> bytes:
        blob = self._journal.message(number)
        if blob is None or hashlib.sha256(blob).hexdigest() != digest:
            raise LedgerDamaged(f"the account in {self.folder} is damaged: its records were changed", number)
        return blob

    def left(self, table: Digests) -> float:
        """The share of the grant that the most-spent record of a table still has."""
        return max(0.0, 1 - self.share(self.spending().most(table, self.identity)))

    def held(self) -> list[Draw]:
        """Runs that were joined and have reserved nothing yet, as far as the account knows."""
        return list(held(self.draws.values()))

    def may_lapse(self, run: str) -> bool:
        """Whether a hold's own ledger shows that nothing was reserved. See `draws.never_reserved`."""
        return never_reserved(self.draws[run], self.marks.get(run))

    def next_run(self, table: Digests) -> float | None:
        """ε of the largest further run that would fit, charged in full; None where there is no such figure."""
        if self.lifetime.budget is None:
            return None
        return _finite(largest(self.lifetime, self.spending().most(table, self.identity)))

    def afford(self, plan: PrivacyPlan, table: Digests, lapsing: AbstractSet[str] = frozenset()) -> None:
        """Raises `DrawRefused` where a new run with this plan could not be held; writes nothing."""
        self._refuse_overdraft("the next run", self.lifetime.price(plan), table, lapsing)

    def share(self, cost: float) -> float:
        """A cost as a share of the cap; nothing is ever used up where the cap is ∞."""
        return 0.0 if math.isinf(self.lifetime.cap) else cost / self.lifetime.cap

    def hold(
        self,
        run: str,
        agreement: str,
        plan: PrivacyPlan,
        table: Digests,
        ledger: Path,
        lapsing: AbstractSet[str] = frozenset(),
    ) -> Draw:
        """Counts a run's full price against the grant, from every record of its table, durably.

        Asking again for the same run, agreement and records holds nothing more.

        Args:
            run: Its name.
            agreement: Digest of what was agreed.
            plan: Its plan.
            table: The silo's records.
            ledger: Where its own ledger will lie.
            lapsing: Held runs that may lapse in its favour; the caller has asked `may_lapse` for each.

        Raises:
            DrawRefused: It does not fit, or was held on other terms or records. Nothing is written.
        """
        mark, cost = fingerprint(self.secret(), table), self.lifetime.price(plan)
        with self._journal.transaction(self._read):
            known = self.draws.get(run)
            if known is not None and known.counts:
                self._check_same(known, agreement, plan, mark)
                return known
            self._refuse_overdraft(f"run {run!r}", cost, table, lapsing)
            lapsed = [
                self._journal.append("lapse", {"run": draw.run}, refers=draw.rows)
                for draw in self.held()
                if draw.run in lapsing
            ]
            rows = table.astype("<u8").tobytes()
            value = {
                "run": run,
                "agreement": agreement,
                "plan": plan.to_dict(),
                "cost": _finite(cost),
                "records": len(table),
                "table": mark,
                "at": int(time.time()),
                "rows": hashlib.sha256(rows).hexdigest(),
                "ledger": str(ledger),
            }
            entry = self._journal.append("hold", value)
            self._journal.put_message(entry.number, 0, rows)
        for one in (*lapsed, entry):
            self._read(one)
        return self.draws[run]

    def draw(self, run: str) -> Draw:
        """What a run holds is drawn, for good: on disk before its first reservation. Drawing again does nothing.

        Raises:
            DrawRefused: It holds nothing, or its hold has lapsed.
        """
        if run in self.draws and self.draws[run].state is State.DRAWN:
            return self.draws[run]
        with self._journal.transaction(self._read):
            known = self.draws.get(run)
            if known is None or not known.counts:
                raise DrawRefused(f"run {run!r} holds nothing in {self.folder} any more: restart the silo")
            if known.state is State.DRAWN:
                return known
            blob, number = b"", self._journal.number + 1
            if len(self.held()) == 1:  # nothing of what was held since is open any more
                blob = self.spending().pack()
            value = {"run": run, "spending": hashlib.sha256(blob).hexdigest() if blob else None}
            entry = self._journal.append("draw", value, key=canonical(["draw", run]), refers=known.rows)
            if blob:
                self._journal.drop_messages(self._journal.kept_messages())
                self._journal.put_message(number, 0, blob)
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
                "state": str(d.state),
            }
            for d in self.draws.values()
            if d.counts
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

    def _refuse_overdraft(self, who: str, cost: float, table: Digests, lapsing: AbstractSet[str]) -> None:
        spent = self.spending(lapsing).most(table, self.identity)
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
                case "hold" if self._may_hold(value["run"]):
                    self._take(Draw.read(entry, value))
                case "lapse" if self._refers_to_hold(entry, value):
                    self._take(self.draws[value["run"]].then(State.LAPSED, entry))
                case "draw" if self._refers_to_hold(entry, value):
                    self._take(self.draws[value["run"]].then(State.DRAWN, entry))
                    self._read_spending(entry, value)
                case "draw" if entry.refers is None and not self._since and value["run"] not in self.draws:
                    self.draws[value["run"]] = Draw.read(entry, value)  # drawn on joining, as it was before holds
                    self._read_spending(entry, value)
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

    def _may_hold(self, run: str) -> bool:
        return run not in self.draws or not self.draws[run].counts

    def _refers_to_hold(self, entry: Entry, value: dict[str, Any]) -> bool:
        known = self.draws.get(value["run"])
        return known is not None and known.state is State.HELD and entry.refers == known.rows

    def _take(self, draw: Draw) -> None:
        self.draws[draw.run] = self._since[draw.rows] = draw

    def _read_spending(self, entry: Entry, value: dict[str, Any]) -> None:
        if value["spending"] is None:
            return
        if any(held(self.draws.values())):
            raise UserError("what is held cannot be settled")
        self._spending = entry.number, str(value["spending"])
        self._since.clear()

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
    sync_folder(folder)


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
