"""One lifetime grant for all runs of a federation in one process (R15): drawn on before anything is reserved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from modicum.data.arrays import FederatedData
from modicum.data.check import refuse_population
from modicum.data.digests import blocks
from modicum.errors import UserError
from modicum.federation.receipts import Receipts
from modicum.federation.run_folder import RunFolder
from modicum.federation.simulation import Simulation
from modicum.privacy.lifetime import Lifetime
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.files import exists
from modicum.privacy.lifetime.planning import lifetime_for
from modicum.privacy.lifetime.spending import Digests, Identity, by_contents
from modicum.privacy.plan import PrivacyPlan


@dataclass(frozen=True, kw_only=True)
class Account:
    """What all runs on the same records may ever tell about one of them.

    Args:
        budget: ε over all runs.
        folder: where the account is kept: outside of any run's folder.
        delta: δ of the same.
        opened_for: plans that the account's filter is chosen for, where a look at the data opens it before the
            training that they are of [default: those of the run that opens it].
    """

    budget: float
    folder: str
    delta: float = 1e-5
    opened_for: tuple[PrivacyPlan, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.budget > 0 or not 0 < self.delta < 1:
            raise UserError("a lifetime budget must be positive and delta between 0 and 1")


@contextmanager
def drawn(run: Simulation, account: Account) -> Iterator[Callable[[], None]]:
    """The run's price, from every record of every client; once, however often it is resumed.

    Records are known by their contents, wherever a division puts them: all pay what the dearest client's do. What
    real noise was drawn for is never drawn for again: an older copy of the account, or of the run, is refused.

    Yields:
        What is called after each round: it notes how far the run's ledger has come.

    Raises:
        DrawRefused: The run does not fit into what is left; nothing was drawn.
    """
    refuse_population(run.experiment.federation.data, "an account")
    plans, folder = tuple(run.plans.values()), Path(account.folder)
    receipts = Receipts(run.folder, folder, str(folder.absolute()))
    real = not run.noise.describe()["simulation"]
    if not exists(folder):
        if real:
            receipts.check(None)
        new = lifetime_for(account.budget, account.delta, account.opened_for or plans)
        for plan in plans:
            new.price(plan)  # a run without a price opens no account
        DatasetAccount.start(folder, new, Identity.CONTENTS).close()
    with DatasetAccount.open(folder) as kept:
        kept.check(replace(kept.lifetime, budget=account.budget, delta=account.delta), Identity.CONTENTS)
        if real:
            receipts.check(kept)
        dearest = _dearest(kept.lifetime, plans)
        name, ledger = run.ledger.run_id, RunFolder(run.folder).ledger
        kept.hold(name, name, dearest, _table(kept, run.experiment.federation.data), ledger.absolute())
        done = kept.draw(name)
        if not real:  # from a seed the same is drawn again, in whatever copy
            yield lambda: None
            return
        kept.check_ledger(name, ledger)
        receipts.note(kept, done)
        yield lambda: kept.remember(name, len(run.ledger), run.ledger.head())


def _dearest(lifetime: Lifetime, plans: tuple[PrivacyPlan, ...]) -> PrivacyPlan:
    return max(plans, key=lifetime.price)


def _table(kept: DatasetAccount, data: FederatedData) -> Digests:
    parts = (part for c in data.clients for part in (c.train, c.validation, c.test))
    return by_contents(kept.secret(), blocks(*parts))
