"""A silo and the account of its dataset: what it holds and draws, and what it checks on coming back."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from modicum.config.schema import DataConfig
from modicum.data.arrays import ClientData
from modicum.data.digests import blocks
from modicum.data.look import paid
from modicum.data.own import npz_ids
from modicum.data.tables import csv_ids, parquet_ids
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.terms import Join
from modicum.deploy.silo.witness import Statement
from modicum.errors import UserError
from modicum.federation.receipts import Receipts
from modicum.federation.run_folder import RunFolder
from modicum.privacy.accounting.rdp import ORDERS
from modicum.privacy.ledger import Ledger
from modicum.privacy.lifetime import SIMULATED, DrawRefused, Filter, Lifetime, order_for, samples
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.files import exists
from modicum.privacy.lifetime.spending import Digests, Identity, by_contents, by_id, plain_id, whole_client
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.spec import Adjacency, Unit

LOG = logging.getLogger("modicum.silo")


class Account(Protocol):
    """What a silo asks of its account."""

    def hold(self, join: Join, plan: PrivacyPlan) -> None:
        """Holds the run's price, once; raises `DrawRefused` where it does not fit. Before there is a ledger."""

    def draw(self, run: str) -> None:
        """Draws what the run holds, once and for good. Before anything is reserved."""

    def afford(self, plan: PrivacyPlan) -> None:
        """Raises `DrawRefused` where `hold` would; holds nothing."""

    def remember(self, ledger: Ledger) -> None:
        """Notes how far the run's ledger has come. Before anything is sent."""

    def shown(self) -> Statement | None:
        """How far it has come, unsigned; None where none is kept."""

    def holds(self, statement: Statement) -> bool:
        """Whether this is an account that somebody remembers, with all that he remembers of it."""

    def statement(self, run: str) -> dict[str, Any]:
        """The certificate's section on the account."""

    def close(self) -> None:
        """Close its files; what was drawn stays drawn."""


@dataclass(frozen=True)
class Exempt:
    """No account is kept, and the certificate says why."""

    reason: str

    def hold(self, join: Join, plan: PrivacyPlan) -> None:
        pass

    def draw(self, run: str) -> None:
        pass

    def afford(self, plan: PrivacyPlan) -> None:
        pass

    def remember(self, ledger: Ledger) -> None:
        pass

    def shown(self) -> Statement | None:
        return None

    def holds(self, statement: Statement) -> bool:
        return True

    def statement(self, run: str) -> dict[str, Any]:
        return {"kept": False, "sentence": self.reason}

    def close(self) -> None:
        pass


def account_of(spec: SiloSpec, own: ClientData) -> Account:
    """The silo's account. A simulation protects nobody and is not counted; public data have nothing to spend."""
    name = spec.experiment.data.name
    if name is None and spec.simulation and exists(spec.account_folder):
        raise UserError(
            f"these records have an account in {spec.account_folder}, and simulated noise would tell about them "
            "without end: simulate with other data, or leave simulation out"
        )
    if spec.simulation:
        return Exempt(SIMULATED)
    if name is not None:
        return Exempt(f"No account is kept: {name!r} are public data.")
    return SiloAccount(spec, own)


class SiloAccount:
    """The account of a silo's own records, opened by its first run."""

    def __init__(self, spec: SiloSpec, own: ClientData) -> None:
        self.spec, self.own = spec, own
        self._account: DatasetAccount | None = None
        self._records: Digests | None = None
        if exists(spec.account_folder):
            self._account = DatasetAccount.open(spec.account_folder)
            self._account.check(lifetime_in(spec, self._account.lifetime), *identity_of(spec))
        self._receipts = Receipts(spec.folder, spec.account_folder, spec.name)
        self._receipts.check(self._account, new=new_account(spec))
        self._check_looks()

    def hold(self, join: Join, plan: PrivacyPlan) -> None:
        if self._account is None:
            self._account = self._begin(plan)
        account, ledger = self._account, RunFolder(self.spec.folder).ledger.absolute()
        agreement = hashlib.sha256(join.terms()).hexdigest()
        lapsing = unused(account) - {join.run}
        done = account.hold(join.run, agreement, plan, self._table(account), ledger, lapsing)
        for run in sorted(run for run in lapsing if not account.draws[run].counts):
            LOG.info("run %s never reserved anything: what it held in the account is free again", run)
        account.check_ledger(join.run, ledger)
        self._receipts.note(account, done)

    def draw(self, run: str) -> None:
        assert self._account is not None  # held on before there was a ledger
        self._receipts.note(self._account, self._account.draw(run))

    def afford(self, plan: PrivacyPlan) -> None:
        if self._account is None:
            lifetime = lifetime_for(self.spec, plan)
            if lifetime.price(plan) > lifetime.cap:
                raise DrawRefused(
                    "this run alone asks more than the lifetime grant under [account]: plan fewer rounds or a "
                    "smaller budget"
                )
        else:
            self._account.afford(plan, self._table(self._account), unused(self._account))

    def remember(self, ledger: Ledger) -> None:
        assert self._account is not None  # drawn on before there was a ledger
        self._account.remember(ledger.run_id, len(ledger), ledger.head())

    def shown(self) -> Statement | None:
        account = self._account
        return Statement("", 0, "") if account is None else Statement(account.id, account.entries, account.head)

    def holds(self, statement: Statement) -> bool:
        account = self._account
        known = account is not None and account.id == statement.id
        return known and account is not None and account.holds(statement.entries, statement.head)

    def statement(self, run: str) -> dict[str, Any]:
        assert self._account is not None
        return self._account.statement(run)

    def overview(self) -> dict[str, Any]:
        """Grant, draws, and what is left for the table as it is now."""
        account, folder = self._account, str(self.spec.account_folder)
        if account is None:
            sentence = f"The first run opens the account in {folder}; nothing is drawn yet."
            return {"kept": True, "opened": False, "folder": folder, "sentence": sentence}
        table = self._table(account)
        return {
            "kept": True,
            "opened": True,
            "folder": folder,
            **account.overview(),
            "records": len(table),
            "left": account.left(table),
            "next": account.next_run(table),
        }

    def close(self) -> None:
        if self._account is not None:
            self._account.close()

    def _begin(self, plan: PrivacyPlan) -> DatasetAccount:
        lifetime, identity = lifetime_for(self.spec, plan), identity_of(self.spec)
        lifetime.price(plan)  # a run without a price opens no account
        account = DatasetAccount.start(self.spec.account_folder, lifetime, *identity)
        account.check(lifetime_in(self.spec, account.lifetime), *identity)  # another process may have been first
        return account

    def _table(self, account: DatasetAccount) -> Digests:
        if self._records is None:
            self._records = table_of(self.spec, self.own, account.secret())
        return self._records

    def _check_looks(self) -> None:
        """A look's file comes from the server, and what it says was paid is taken off this silo's noise."""
        draws = {} if self._account is None else self._account.draws
        for look in self.spec.experiment.looks:
            own, said = draws.get(look.run), (look.spec, look.releases.get(self.spec.name))
            if own is None or said != (own.plan.spec, paid(own.plan, look.run)):
                raise UserError(
                    f"the account in {self.spec.account_folder} did not pay for the look {look.run} what its file "
                    "says: use the file of a look that this silo took part in, as it was, or leave the look out"
                )


def unused(account: DatasetAccount) -> frozenset[str]:
    """Runs that hold something and never reserved anything, in folders that no process is at work in."""
    waiting = (d for d in account.held() if d.ledger is not None and not RunFolder(d.ledger.parent).held())
    return frozenset(d.run for d in waiting if account.may_lapse(d.run))


def new_account(spec: SiloSpec) -> bool:
    """Whether all agreed that this silo begins a new account."""
    agreed = spec.experiment.run.silos.get(spec.name)
    return agreed is not None and agreed.account == "new"


def lifetime_for(spec: SiloSpec, first: PrivacyPlan) -> Lifetime:
    """The grant of a new account. What the silo's file leaves open follows from the first run's plan."""
    a, order = spec.account, None
    kind = Filter(a.filter or ("rdp" if samples(first) else "gdp"))
    if a.budget is not None and kind is Filter.RDP:
        order = a.order or order_for(*_about(spec), a.budget, a.delta, first)
    return _lifetime(spec, kind, order)


def lifetime_in(spec: SiloSpec, opened: Lifetime) -> Lifetime:
    """The grant that the silo's file states now. What it leaves open is as in the account."""
    a = spec.account
    kind = Filter(a.filter or (Filter.GDP if opened.filter is Filter.ONE_RUN else opened.filter))
    return _lifetime(spec, kind, a.order or opened.order or ORDERS[-1] if kind is Filter.RDP else None)


def _lifetime(spec: SiloSpec, kind: Filter, order: float | None) -> Lifetime:
    (unit, adjacency), a = _about(spec), spec.account
    if a.budget is None:
        return Lifetime(unit=unit, adjacency=adjacency, filter=Filter.ONE_RUN)
    return Lifetime(unit=unit, adjacency=adjacency, filter=kind, budget=a.budget, delta=a.delta, order=order)


def _about(spec: SiloSpec) -> tuple[Unit, Adjacency]:
    return Unit(spec.account.unit or spec.grant.unit), Adjacency(spec.account.adjacency or spec.grant.adjacency)


def identity_of(spec: SiloSpec) -> tuple[Identity, str | None]:
    """What identifies a record: a declared id and its column, else its contents; in a client's account nothing."""
    data = spec.experiment.data
    column = data.id_column if data.rows_per_person is None else data.person
    if _about(spec)[0] is Unit.CLIENT:
        return Identity.CLIENT, None
    if data.rows_per_person is not None and _about(spec)[0] is not Unit.PERSON:
        raise UserError(
            'the agreed run hides persons, and the account is of records: set unit = "person" under [grant] and '
            "[account]"
        )
    return (Identity.CONTENTS if column is None else Identity.ID), column


def table_of(spec: SiloSpec, own: ClientData, key: bytes) -> Digests:
    """Digests of every record that the silo holds, in whatever part of its division: another seed shifts them."""
    match identity_of(spec)[0]:
        case Identity.CLIENT:
            return whole_client()
        case Identity.ID:
            return by_id(key, record_ids(spec))
        case Identity.CONTENTS:
            return by_contents(key, blocks(own.train, own.validation, own.test))


def record_ids(spec: SiloSpec) -> list[str]:
    """Who each of the silo's own records or persons is, in the order of its table, by the column that says so."""
    data = spec.experiment.data
    column = data.id_column if data.rows_per_person is None else data.person
    assert column is not None
    if data.partition not in (None, "natural"):
        raise UserError(f"{column!r} needs the clients that the data come with: leave partition under [data] out")
    found = _column(data, spec.name, column)
    return found if data.rows_per_person is None else list(dict.fromkeys(plain_id(key) for key in found))


def _column(data: DataConfig, client: str, column: str) -> list[str]:
    if data.npz is not None:
        return npz_ids(data.npz, client, column)
    assert data.table is not None  # named data have no account
    ids = parquet_ids if data.csv is None else csv_ids
    return ids(data.table, client, client=data.client_column, id=column)


def overview(spec: SiloSpec, own: ClientData) -> dict[str, Any]:
    """The account as its operator sees it. What is left depends on the records: it is not for others."""
    kept = account_of(spec, own)
    try:
        if isinstance(kept, SiloAccount):
            return kept.overview()
        return kept.statement("")
    finally:
        kept.close()
