"""What a joined run holds: it counts, and lapses only where its ledger shows that the run never began."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np
import pytest
from account_actor import Draw, State, killed_at, new, plan, release_noted, table
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.privacy.events import Block, NoSampling, Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import Journal, LedgerDamaged
from modicum.privacy.lifetime import DrawRefused
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.spending import Identity, Spending
from modicum.privacy.noise import CryptoNoise

COST = 0.04  # of μ² = 0.0718 for ε = 1: one such run fits, two do not


def hold(account: DatasetAccount, run: str, lapsing: AbstractSet[str] = frozenset(), cost: float = COST) -> Draw:
    ledger = account.folder.parent / run / "ledger.sqlite"
    return account.hold(run, "agreed", plan(z=cost**-0.5), table(1, 2), ledger, lapsing)


def begin(account: DatasetAccount, run: str) -> Path:
    """The run's own ledger, with its plan and no reservation, as the account is told of it."""
    path = account.folder.parent / run / "ledger.sqlite"
    with Ledger.create(path, run, CryptoNoise()) as ledger:
        ledger.declare([plan(z=COST**-0.5)])
        account.remember(run, len(ledger), ledger.head())
    return path


def reserve(path: Path) -> None:
    with Ledger.open(path) as ledger:
        spec, z = ledger.plans["ward"].spec, COST**-0.5
        blocks = (Block("gradient", 1.0, z),)
        ledger.reserve([Release(client="ward", round=0, spec=spec, blocks=blocks, sampler=NoSampling())])


def test_what_is_held_counts_and_becomes_a_draw(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        assert hold(account, "r").state is State.HELD
        with pytest.raises(DrawRefused, match=r"'s' asks 55\.7% .* 44\.3% is left"):
            hold(account, "s")
        before = account.head
        assert hold(account, "r").state is State.HELD
        assert account.head == before
        assert account.draw("r").state is State.DRAWN
        assert account.draw("r") == account.draws["r"]
        with pytest.raises(DrawRefused):
            hold(account, "s")
    with DatasetAccount.open(tmp_path / "a") as again:
        assert again.spending().of(table(1, 2, 3), Identity.ID).tolist() == pytest.approx([COST, COST, 0])
        with pytest.raises(DrawRefused, match="holds nothing"):
            again.draw("nobody")


def test_an_account_that_forgets_what_is_held_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: two runs join before either has begun, and together they draw more than the grant."""
    honest = DatasetAccount.spending

    def forgetful(self: DatasetAccount, lapsing: AbstractSet[str] = frozenset()) -> Spending:  # noqa: ARG001
        return honest(self, {draw.run for draw in self.held()})

    with new(tmp_path / "a") as account:
        with monkeypatch.context() as broken:
            broken.setattr(DatasetAccount, "spending", forgetful)
            hold(account, "r"), hold(account, "s")
        account.draw("r"), account.draw("s")
        assert account.spending().most(table(1), Identity.ID) > account.lifetime.cap


def test_a_hold_lapses_where_the_ledger_shows_that_nothing_began(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        hold(account, "r"), begin(account, "r")
        assert account.may_lapse("r")
        hold(account, "s", {"r"})
        assert account.draws["r"].state is State.LAPSED
        with pytest.raises(DrawRefused, match="holds nothing"):
            account.draw("r")  # so that a silo that comes back reserves nothing
        with pytest.raises(DrawRefused):
            hold(account, "r")
        begin(account, "s")
        assert hold(account, "r", {"s"}).state is State.HELD
        account.draw("r")
    with DatasetAccount.open(tmp_path / "a") as again:
        assert [draw.run for draw in again.draws.values() if draw.counts] == ["r"]
        assert again.spending().most(table(1), Identity.ID) == pytest.approx(COST)


def _reserved(path: Path) -> None:
    reserve(path)


def _missing(path: Path) -> None:
    path.unlink()


def _changed(path: Path) -> None:
    with Journal.open(path) as journal:
        journal._db.execute("DROP TRIGGER journal_keeps_every_field")
        journal._db.execute("UPDATE journal SET body = '{}' WHERE number = 1")


def _another(path: Path) -> None:
    path.unlink()
    with Ledger.create(path, "another", CryptoNoise()) as ledger:
        ledger.declare([plan(z=COST**-0.5)])


def _made_anew(path: Path) -> None:
    """The same run and no plan: not what the account remembers."""
    path.unlink()
    Ledger.create(path, "r", CryptoNoise()).close()


@pytest.mark.parametrize("how", [_reserved, _missing, _changed, _another, _made_anew])
def test_any_other_ledger_keeps_what_is_held(tmp_path: Path, how: object) -> None:
    with new(tmp_path / "a") as account:
        hold(account, "r")
        how(begin(account, "r"))  # type: ignore[operator]
        assert not account.may_lapse("r")


def test_a_run_whose_ledger_was_never_noted_keeps_what_it_holds(tmp_path: Path) -> None:
    """Killed between joining and its ledger: nobody can tell that from a ledger that was taken away."""
    with new(tmp_path / "a") as account:
        hold(account, "r")
        assert not account.may_lapse("r")


def test_a_ledger_put_back_from_before_it_began_gives_nothing_back(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        hold(account, "r")
        path = begin(account, "r")
        shutil.copy(path, tmp_path / "older")
        account.draw("r")
        reserve(path)
        shutil.copy(tmp_path / "older", path)
        assert not account.may_lapse("r")
        hold(account, "s", {"r"}, cost=0.001)  # whatever anybody claims
        assert account.draws["r"].state is State.DRAWN


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "draw", "lapse"]), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=4)
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_people_never_pass_the_cap_in_whatever_order_runs_hold_draw_and_lapse(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, list[int]]]
) -> None:
    """Four people, as in `test_dataset_account`: rows are edited and absent. Only what was drawn was released."""
    truly = dict.fromkeys(range(4), 0.0)
    there: dict[str, list[int]] = {}
    with new(tmp_path_factory.mktemp("a") / "a") as account:
        for number, (step, which, named) in enumerate(steps):
            held = account.held()
            if step == "hold" or not held:
                people = [p for p in range(4) if named.count(p) < 2]
                rows = np.array(sorted(p + 10 * named.count(p) for p in people), dtype=np.uint64)
                lapsing = {held[which % len(held)].run} if step == "lapse" and held else set()
                try:
                    account.hold(f"r{number}", "", plan(z=0.03**-0.5), rows, Path("none"), lapsing)
                except DrawRefused:
                    continue
                there[f"r{number}"] = people
            elif step == "lapse":
                with account._journal.transaction(account._read):
                    draw = held[which % len(held)]
                    entry = account._journal.append("lapse", {"run": draw.run}, refers=draw.rows)
                account._read(entry)
            else:
                run = held[which % len(held)].run
                account.draw(run)
                for person in there[run]:
                    truly[person] += 0.03
            spent = account.spending()
            assert spent.spent.max(initial=0.0) <= account.lifetime.cap + 1e-12
        assert max(truly.values()) <= account.lifetime.cap + 1e-12


def joins_twice(folder: Path, log: Path, run: str) -> None:
    """A run that never begins, and one that takes its place, draws and releases."""
    with new(folder / "a") as account:
        if run not in account.draws or account.draws[run].state is State.LAPSED:
            hold(account, run, {draw.run for draw in account.held() if account.may_lapse(draw.run)})
        if run not in account.marks:
            shutil.rmtree(folder / run, ignore_errors=True)
            begin(account, run)
        if run == "s":
            account.draw(run)
            release_noted(log, run)
            account.remember(run, 3, "h")


def test_a_kill_anywhere_leaves_what_is_held_or_drawn(tmp_path: Path) -> None:
    """Both fit only one after the other: whenever it dies, whoever released has drawn, and nobody drew twice."""
    for die_at in range(1, 500):
        place, log = tmp_path / str(die_at), tmp_path / f"{die_at}.log"
        place.mkdir()
        finished = not killed_at(die_at, place, log, ["r", "s"], joins_twice)
        for run in ("r", "s"):
            with new(place / "a") as account:
                if run == "r" and account.draws.get("s"):
                    continue  # its place is taken
            joins_twice(place, log, run)
        with DatasetAccount.open(place / "a") as account:
            states = {run: draw.state for run, draw in account.draws.items()}
            assert states == {"r": State.LAPSED, "s": State.DRAWN}
            assert account.spending().most(table(1), Identity.ID) == pytest.approx(COST)
        if finished:
            assert die_at > 40
            return
    raise AssertionError("the child never finished")


def test_an_account_of_before_there_were_holds_goes_on(tmp_path: Path) -> None:
    """Its draws hold everything in one entry."""
    with new(tmp_path / "a") as account:
        blob = Spending.nothing().after(table(1, 2), COST, Identity.CONTENTS).pack()
        value = {
            "run": "old",
            "agreement": "agreed",
            "plan": plan(z=COST**-0.5).to_dict(),
            "cost": COST,
            "records": 2,
            "table": "",
            "at": 1,
            "spending": hashlib.sha256(blob).hexdigest(),
        }
        with account._journal.transaction(account._read):
            account._journal.append("draw", value, key='["draw","old"]')
            account._journal.put_message(2, 0, blob)
    with DatasetAccount.open(tmp_path / "a") as again:
        assert again.draws["old"].state is State.DRAWN
        with pytest.raises(DrawRefused):
            hold(again, "r")
        hold(again, "s", cost=0.01)
        again.draw("s")
        assert again.spending().most(table(1), Identity.ID) == pytest.approx(COST + 0.01)


def test_rows_of_what_is_held_cannot_be_changed(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        hold(account, "r")
        account._journal._db.execute("UPDATE outbox SET message = zeroblob(16)")
        with pytest.raises(LedgerDamaged, match="its records were changed"):
            hold(account, "s")
