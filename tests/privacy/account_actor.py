"""Accounts for tests: grants, plans, tables, and a silo's life in one function that may be killed anywhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from modicum.privacy.events import KnownTo, NoSampling, Poisson, Sampler
from modicum.privacy.ledger.journal import Journal
from modicum.privacy.lifetime import Filter, Lifetime
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.draws import Draw, State
from modicum.privacy.lifetime.spending import Digests, Identity
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit

FORK = multiprocessing.get_context("fork")
RECORD = PrivacySpec(unit=Unit.RECORD)
CLIENT = PrivacySpec(unit=Unit.CLIENT)


def gdp(epsilon: float = 1.0, unit: str = "record", adjacency: str = "zero-out") -> Lifetime:
    return Lifetime(unit=Unit(unit), adjacency=Adjacency(adjacency), filter=Filter.GDP, budget=epsilon, delta=1e-5)


def rdp(epsilon: float = 1.0, order: float = 17.0, unit: str = "record", adjacency: str = "zero-out") -> Lifetime:
    kind = {"unit": Unit(unit), "adjacency": Adjacency(adjacency)}
    return Lifetime(**kind, filter=Filter.RDP, budget=epsilon, delta=1e-5, order=order)


def plan(
    z: float = 10.0, count: int = 1, q: float = 1.0, *, spec: PrivacySpec = RECORD, budget: float = 100.0
) -> PrivacyPlan:
    sampler: Sampler = NoSampling() if q == 1 else Poisson(q, KnownTo.CLIENT)
    releases = (PlannedRelease("gradient", z, sampler, count),)
    return PrivacyPlan(client="ward", spec=spec, budget=budget, releases=releases)


def filter_plan(budget: float, order: float | None = None, *, spec: PrivacySpec = RECORD) -> PrivacyPlan:
    guard = Guard.GDP_FILTER if order is None else Guard.RDP_FILTER
    return PrivacyPlan(client="ward", spec=spec, budget=budget, guard=guard, order=order)


def table(*records: int) -> Digests:
    return np.unique(np.array(records, dtype=np.uint64))


def new(folder: Path, lifetime: Lifetime | None = None, identity: Identity = Identity.CONTENTS) -> DatasetAccount:
    return DatasetAccount.start(folder, lifetime or gdp(), identity)


def drawn(account: DatasetAccount, run: str, agreement: str, plan: PrivacyPlan, rows: Digests) -> Draw:
    """Held, then drawn, as a silo does it."""
    account.hold(run, agreement, plan, rows, account.folder / "no-ledger")
    return account.draw(run)


Life = Callable[[Path, Path, str], None]


def sound(folder: Path, log: Path, run: str) -> None:
    """Draw, then release: what the outside sees is written with plain writes that a kill cannot take back."""
    with DatasetAccount.start(folder, gdp(), Identity.CONTENTS) as account:
        drawn(account, run, "agreed", plan(), table(1, 2, 3))
        release_noted(log, run)
        account.remember(run, 2, "h")


def releases_before_it_draws(folder: Path, log: Path, run: str) -> None:
    with DatasetAccount.start(folder, gdp(), Identity.CONTENTS) as account:
        account.hold(run, "agreed", plan(), table(1, 2, 3), folder / "no-ledger")
        release_noted(log, run)
        account.draw(run)


def release_noted(log: Path, run: str) -> None:
    """Seen outside: written so that a kill cannot take it back."""
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(file, (json.dumps(run) + "\n").encode())
    os.close(file)


def undrawn(folder: Path, log: Path) -> list[str]:
    """Runs that released something and that the account does not own up to, record by record."""
    released = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not (folder / "account.sqlite").exists():
        return released
    with DatasetAccount.open(folder, read_only=True) as account:
        spent = account.spending().of(table(1, 2, 3), account.identity).min()
        paid = sum(d.cost for d in account.draws.values())
        assert abs(spent - paid) < 1e-12
        return [r for r in released if r not in account.draws or account.draws[r].state is not State.DRAWN]


class _Dies:
    """Kills the process before its n-th step that could leave a trace."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _live(folder: Path, log: Path, runs: list[str], life: Life, die_at: int) -> None:
    dies = _Dies(die_at)
    connect, replace = Journal.__init__, os.replace

    def watched(self: Journal, *given: object) -> None:
        connect(self, *given)  # type: ignore[arg-type]
        self._db.set_trace_callback(dies)

    def moved(*arguments: object) -> None:
        dies()
        replace(*arguments)  # type: ignore[arg-type]
        dies()

    Journal.__init__ = watched  # type: ignore[assignment, method-assign]
    os.replace = moved  # type: ignore[assignment]
    for run in runs:
        life(folder, log, run)


def killed_at(die_at: int, folder: Path, log: Path, runs: list[str], life: Life) -> bool:
    """True where the child was killed, False where it finished first."""
    child = FORK.Process(target=_live, args=(folder, log, runs, life, die_at))
    child.start()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return child.exitcode != 0
