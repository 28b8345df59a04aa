"""What of a dataset's account lies on disk: keys, lost files, a run's ledger, kills and processes."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from account_actor import (
    FORK,
    drawn,
    gdp,
    killed_at,
    new,
    plan,
    rdp,
    releases_before_it_draws,
    sound,
    table,
    undrawn,
)
from test_dataset_account import ONE_RUN, X, Y

from modicum.errors import UserError
from modicum.privacy.ledger.journal import Journal, LedgerDamaged
from modicum.privacy.lifetime import DrawRefused
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.spending import Identity, by_contents


def test_the_key_is_private_and_stays_out_of_the_file(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        key = account.secret()
        rows = by_contents(key, [(X, Y)])
        drawn(account, "r", "agreed", plan(), rows)
    assert stat.S_IMODE((tmp_path / "a" / "account.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a" / "account.sqlite").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert key not in (tmp_path / "a" / "account.sqlite").read_bytes()
    assert not np.isin(by_contents(b"x" * 32, [(X, Y)]), rows).any()  # without the key no record is found


def test_a_grant_and_what_identifies_a_record_never_change(tmp_path: Path) -> None:
    new(tmp_path / "a").close()
    with DatasetAccount.open(tmp_path / "a") as account:
        account.check(gdp(), Identity.CONTENTS)
        for other in (gdp(2.0), rdp(), gdp(adjacency="replace-one"), gdp(unit="client"), ONE_RUN):
            with pytest.raises(UserError, match="a lifetime grant never changes"):
                account.check(other, Identity.CONTENTS)
        with pytest.raises(UserError, match="all would count as new"):
            account.check(gdp(), Identity.ID)
    with new(tmp_path / "a", gdp(100.0)) as account:  # beginning it again changes nothing
        assert account.lifetime == gdp()


def test_a_lost_file_or_key_is_refused(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        drawn(account, "r", "agreed", plan(), table(1))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "account.key").unlink()
    with pytest.raises(UserError, match=r"without it no record is recognised"):
        new(tmp_path / "a")
    with DatasetAccount.open(tmp_path / "a", read_only=True) as looked:
        assert list(looked.draws) == ["r"]
    (tmp_path / "a" / "account.key").write_bytes(b"k" * 32)
    with pytest.raises(UserError, match="not the key of this account"):
        new(tmp_path / "a")
    (tmp_path / "b" / "account.sqlite").unlink()
    with pytest.raises(UserError, match=r"has lost account\.sqlite"):
        new(tmp_path / "b")


def test_changed_records_or_entries_are_found(tmp_path: Path) -> None:
    for what, said in {
        "UPDATE outbox SET message = zeroblob(16)": "its records were changed",
        "DELETE FROM outbox": "its records were changed",
    }.items():
        folder = tmp_path / said.replace(" ", "-") / what[:6]
        with new(folder) as account:
            drawn(account, "r", "agreed", plan(), table(1))
            account._journal._db.execute(what)
            with pytest.raises(LedgerDamaged, match=said):
                drawn(account, "s", "agreed", plan(), table(1))


@pytest.mark.parametrize("kind", ["account", "draw", "hold", "lapse", "mark", "other"])
def test_an_entry_that_does_not_belong_is_refused(tmp_path: Path, kind: str) -> None:
    """A second grant, a draw twice, what is drawn held or lapsed, a run that drew nothing, anything unknown."""
    with new(tmp_path / "a") as account:
        drawn(account, "r", "agreed", plan(), table(1))
        first = {e.kind: e.value for e in map(account._journal.entry, (1, 2, 3)) if e}
    value = first.get(kind, {"run": "nobody", "entries": 1, "head": "h"})
    if kind == "lapse":
        value = {"run": "r"}
    if kind == "account":
        value["lifetime"]["epsilon"] = 100.0
    with Journal.open(tmp_path / "a" / "account.sqlite") as journal, journal.transaction(lambda _: None):
        journal.append(kind, value)
    with pytest.raises(LedgerDamaged, match="does not belong here"):
        DatasetAccount.open(tmp_path / "a")


# A run's ledger, as the account remembers it.


def ledger_of(path: Path, lines: int) -> Journal:
    journal = Journal.create(path)
    with journal.transaction(lambda _: None):
        for i in range(lines):
            journal.append("line", {"i": i})
    return journal


def test_a_ledger_that_is_gone_or_older_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with new(tmp_path / "a") as account:
        drawn(account, "r", "agreed", plan(), table(1))
        account.check_ledger("r", path)  # nothing is remembered yet: it never began
        with ledger_of(path, 2):
            pass
        shutil.copy(path, tmp_path / "older.sqlite")
        with Journal.open(path) as journal:
            with journal.transaction(lambda _: None):
                journal.append("line", {"i": 2})
            account.remember("r", journal.number, journal.head)
        account.check_ledger("r", path)
        with Journal.open(path) as journal, journal.transaction(lambda _: None):
            journal.append("line", {"i": 3})  # a kill before it was noted
        account.check_ledger("r", path)
        with pytest.raises(
            UserError, match="an older copy, or not the ledger that the account remembers at entry 3"
        ):
            account.check_ledger("r", tmp_path / "older.sqlite")
        with ledger_of(tmp_path / "another.sqlite", 0) as other:
            with other.transaction(lambda _: None):
                for i in range(5):
                    other.append("line", {"i": -i})
            with pytest.raises(UserError, match="an older copy"):
                account.check_ledger("r", other.path)
        with pytest.raises(UserError, match=r"absent.sqlite is missing, and the account remembers 3 entries"):
            account.check_ledger("r", tmp_path / "absent.sqlite")


def test_two_silos_cannot_play_the_same_run_on_one_draw(tmp_path: Path) -> None:
    one, other = new(tmp_path / "a"), new(tmp_path / "a")
    for account in (one, other):
        drawn(account, "r", "agreed", plan(), table(1))
        account.remember("r", 2, "begun")
    one.remember("r", 4, "one's first answer")
    with pytest.raises(UserError, match="another silo takes part in run 'r'"):
        other.remember("r", 4, "the other's first answer")
    one.close(), other.close()


# Kills and processes.


def kill_everywhere(folder: Path, life: object) -> tuple[int, list[str]]:
    """Kills a child before its 1st, 2nd, … statement or file move, until one finishes; then goes on from there."""
    problems: list[str] = []
    for die_at in range(1, 500):
        place, log = folder / str(die_at), folder / f"{die_at}.log"
        if not killed_at(die_at, place, log, ["r", "s"], life):  # type: ignore[arg-type]
            return die_at - 1, problems
        problems += undrawn(place, log)
        for run in ("r", "s"):
            life(place, log, run)  # type: ignore[operator]
        problems += undrawn(place, log)
        with DatasetAccount.open(place) as account:
            assert list(account.draws) == ["r", "s"]  # nothing is drawn twice, nothing is forgotten
            assert account.spending().of(table(1), account.identity)[0] == pytest.approx(0.02)
    raise AssertionError("the child never finished")


def test_a_kill_anywhere_loses_no_draw_and_repeats_none(tmp_path: Path) -> None:
    killed, problems = kill_everywhere(tmp_path, sound)
    assert killed > 25
    assert problems == []


def test_an_account_drawn_on_after_releasing_is_caught(tmp_path: Path) -> None:
    _, problems = kill_everywhere(tmp_path, releases_before_it_draws)
    assert problems


def _draw_until_refused(folder: Path, name: str, seen: Path) -> None:
    with new(folder) as account:
        fitted = 0
        for i in range(20):
            try:
                drawn(account, f"{name}-{i}", "agreed", plan(), table(1, 2))
                fitted += 1
            except DrawRefused:
                break
        seen.write_text(json.dumps(fitted))


def test_two_processes_share_one_grant(tmp_path: Path) -> None:
    """Seven draws fit, whoever makes them; both may be the first to open the account."""
    children = [
        FORK.Process(target=_draw_until_refused, args=(tmp_path / "a", name, tmp_path / name)) for name in "pq"
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert sum(json.loads((tmp_path / name).read_text()) for name in "pq") == 7
    with DatasetAccount.open(tmp_path / "a") as account:
        assert len(account.draws) == 7
