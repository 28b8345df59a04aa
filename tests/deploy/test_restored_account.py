"""An account put back from a backup: whoever remembers more refuses it, and its operator is told what to do.

Played with silos on records of their own, real noise, and a server; the backup is a copy of a folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from modicum.config import read
from modicum.deploy.flower.coordinator import ACCOUNTS, Coordinator, Patience
from modicum.deploy.silo import accounts
from modicum.deploy.silo.account import SiloAccount
from modicum.deploy.silo.accounts import FILE
from modicum.deploy.silo.signing import read_signing_key
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.terms import Join
from modicum.deploy.silo.wire import Code
from modicum.deploy.silo.witness import Statement, Witness
from modicum.errors import UserError
from modicum.privacy.lifetime.account import DatasetAccount
from tests.deploy.flower.test_coordinator import Direct, finish
from tests.deploy.secure.helpers import read_raw
from tests.deploy.silo.helpers import key_of, own_records, write_silo

NAMES = ("clinic", "ward")
TEXT = """
[data]
name = "digits"
[method]
name = "dp-sgd"
batch = 40
steps = 1
[run]
rounds = 1
[run.silos]
clinic = { records = 120, budget = 2.0 }
ward = { records = 120, budget = 2.0 }
"""
ACCOUNT = "\n[account]\nbudget = 20.0\n"


@contextmanager
def silos(root: Path, number: int, text: str = TEXT) -> Iterator[dict[str, Silo]]:
    """Everybody's silo with a fresh folder for run `number`; records, keys and accounts stay where they are."""
    made = {}
    for name in NAMES:
        data = own_records(root, name) + ACCOUNT
        path = write_silo(root, name, experiment=text, data=data)
        path.write_text(path.read_text().replace(f"state-{name}", f"run-{number}/state-{name}"))
        made[name] = Silo(read_spec(path))
    try:
        yield made
    finally:
        for silo in made.values():
            silo.close()


def play(root: Path, number: int, text: str = TEXT) -> None:
    with silos(root, number, text) as held:
        config, key = read(root / "experiment.toml"), key_of(root, "server")
        finish(Coordinator(config, NAMES, root / f"run-{number}" / "server", Direct(held), key, Patience(1, 1, 1)))


def folder_of(root: Path, name: str = "ward") -> Path:
    """Where the silo keeps its account."""
    return read_spec(root / f"{name}.toml").account_folder


def back_up(root: Path) -> Path:
    return Path(shutil.copytree(folder_of(root), root / "backup"))


def restore(root: Path) -> None:
    shutil.rmtree(folder_of(root))
    shutil.copytree(root / "backup", folder_of(root))


def draws(root: Path) -> int:
    with DatasetAccount.open(folder_of(root), read_only=True) as found:
        return len(found.draws)


def three_runs_and_an_old_copy(root: Path) -> None:
    play(root, 1)
    back_up(root)
    play(root, 2)
    assert draws(root) == 2
    restore(root)
    assert draws(root) == 1  # what the second run drew could be spent again


def interrupted(root: Path) -> None:
    """A run of which a round was played and that never ended; the copies are of before that round."""
    with silos(root, 1) as held:
        config, key = read(root / "experiment.toml"), key_of(root, "server")
        run = Coordinator(config, NAMES, root / "run-1" / "server", Direct(held), key, Patience(1, 1, 1))
        back_up(root)
        shutil.copytree(root / "run-1" / "state-ward", root / "state-backup")
        run.step()
        run.close()
    restore(root)
    shutil.rmtree(root / "run-1" / "state-ward")
    shutil.copytree(root / "state-backup", root / "run-1" / "state-ward")


def test_a_draw_that_became_a_hold_again_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Account and run put back together to between joining and the first round: the hold would lapse."""
    interrupted(tmp_path / "a")
    with pytest.raises(UserError, match="the account of silo 'ward' is behind"):
        play(tmp_path / "a", 2)
    monkeypatch.setattr(Coordinator, "_hear_draws", lambda *_: None)  # the negative control: joining alone
    interrupted(tmp_path / "b")
    play(tmp_path / "b", 2)


def test_the_server_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    three_runs_and_an_old_copy(tmp_path)
    with pytest.raises(UserError, match=r"the account of silo 'ward' is behind.*put the last copy"):
        play(tmp_path, 3)
    assert draws(tmp_path) == 1
    shutil.rmtree(tmp_path / "backup")


def test_the_other_silo_refuses_where_the_server_forgot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three_runs_and_an_old_copy(tmp_path)
    (tmp_path / "keys" / ACCOUNTS).unlink()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UserError, match="'clinic' does not join: account-behind"),
    ):
        play(tmp_path, 3)
    assert "the account of silo 'ward' is behind" in caplog.text


@contextmanager
def a_server_that_hides(how: str) -> Iterator[None]:
    """It forgets on purpose, and does not pass on what the restored silo states, or spoils it."""

    def hidden(join: Join) -> bytes:
        spoilt = Statement("0" * 16, 99, "0" * 64, "00" * 64)
        accounts = {name: one for name, one in join.accounts.items() if name != "ward"}
        if how == "spoilt":
            accounts["ward"] = spoilt
        return encode(replace(join, accounts=accounts, heard={}))

    encode = Join.encode
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(Join, "encode", hidden)
        yield


@pytest.mark.parametrize("how", ["left out", "spoilt"])
def test_a_server_that_hides_a_statement_is_refused(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It once got another silo's signature under a run in which a restored account was spent again."""
    three_runs_and_an_old_copy(tmp_path)
    (tmp_path / "keys" / ACCOUNTS).unlink()
    with a_server_that_hides(how), pytest.raises(UserError, match="'clinic' does not join: account-behind"):
        play(tmp_path, 3)
    assert "silo 'ward' has no account, and account" in caplog.text


def test_negative_control_a_silo_that_takes_silence_for_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_runs_and_an_old_copy(tmp_path)
    (tmp_path / "keys" / ACCOUNTS).unlink()
    objection = Witness.objection
    monkeypatch.setattr(
        Witness, "objection", lambda w, n, s, *, new: objection(w, n, s, new=new) if s.id else None
    )
    with a_server_that_hides("left out"):
        play(tmp_path, 3)
    assert draws(tmp_path) == 2


def test_what_is_stated_at_joining_is_remembered_at_once(tmp_path: Path) -> None:
    """A server that never says FINISH leaves the other silos with what they heard when the next run began."""
    play(tmp_path, 1)
    with silos(tmp_path, 2) as held:
        config, key = read(tmp_path / "experiment.toml"), key_of(tmp_path, "server")
        run = Coordinator(config, NAMES, tmp_path / "run-2" / "server", Direct(held), key, Patience(1, 1, 1))
        run.close()
    (known,) = Witness(folder_of(tmp_path, "clinic") / FILE).heard("ward")
    (tmp_path / "keys" / ACCOUNTS).unlink()
    with DatasetAccount.open(folder_of(tmp_path), read_only=True) as account:
        assert account.holds(known.entries, known.head)


def test_nobody_who_remembers_and_the_backup_is_spent_twice(tmp_path: Path) -> None:
    """The negative control: without witnesses the third run draws what the second had drawn."""
    three_runs_and_an_old_copy(tmp_path)
    (tmp_path / "keys" / ACCOUNTS).unlink()
    (folder_of(tmp_path, "clinic") / FILE).unlink()
    play(tmp_path, 3)
    assert draws(tmp_path) == 2


def test_a_longer_chain_of_another_history_is_found_by_the_silo_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back, and used with somebody else until it was longer than before."""
    three_runs_and_an_old_copy(tmp_path)
    with DatasetAccount.open(folder_of(tmp_path)) as found:
        run = next(iter(found.draws))
        for i in range(20):
            found.remember(run, 100 + i, f"{i:064x}")
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="'ward' does not join: account-behind"):
        play(tmp_path, 3)
    assert "which is not here" in caplog.text
    monkeypatch.setattr(SiloAccount, "holds", lambda *_: True)  # the negative control: lengths alone
    shutil.rmtree(tmp_path / "run-3")
    play(tmp_path, 3)


def test_an_account_that_is_gone_needs_everybody_s_word(tmp_path: Path) -> None:
    play(tmp_path, 1)
    shutil.rmtree(folder_of(tmp_path))
    with pytest.raises(UserError, match=r"silo 'ward' has no account, and account .* account = \"new\""):
        play(tmp_path, 2)
    shutil.rmtree(tmp_path / "run-2")
    new = TEXT.replace(
        "ward = { records = 120, budget = 2.0", 'ward = { records = 120, budget = 2.0, account = "new"'
    )
    play(tmp_path, 2, new)
    play(tmp_path, 3)  # the new one is known now
    assert len(Witness(tmp_path / "keys" / ACCOUNTS).heard("ward")) == 2


def test_receipts_of_sibling_folders_tell_without_any_network(tmp_path: Path) -> None:
    """Runs side by side in one folder, as an operator keeps them."""

    three_runs_and_an_old_copy(tmp_path)
    (tmp_path / "run-2" / "state-ward").rename(tmp_path / "run-1" / "state-ward-2")
    path = tmp_path / "ward.toml"
    path.write_text(path.read_text().replace("run-2/state-ward", "run-1/state-ward-3"))
    with pytest.raises(UserError, match=r"it lacks the draw of the run in .*state-ward-2"):
        Silo(read_spec(path))
    shutil.rmtree(folder_of(tmp_path))
    with pytest.raises(UserError, match="is an older copy, or gone"):
        Silo(read_spec(path))
    (tmp_path / "run-1" / "state-ward-2" / "account.json").unlink()
    (tmp_path / "run-1" / "state-ward" / "account.json").unlink()
    Silo(read_spec(path)).close()  # the negative control: no receipt, no objection


def test_a_server_makes_up_no_statement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silo remembers of others only what they signed, so that no server can shut one out for good."""
    made_up = Statement("x", 10**6, "0" * 64)
    key = read_signing_key(key_of(tmp_path, "ward"))
    assert made_up.signed(key, "ward").said_by("ward", read_raw(tmp_path, "ward"))
    assert not made_up.signed(key, "ward").said_by("clinic", read_raw(tmp_path, "ward"))
    assert not made_up.said_by("ward", read_raw(tmp_path, "ward"))
    with silos(tmp_path, 1) as held:
        clinic = held["clinic"]
        body = f'{{"ward": ["x", 1000000, "{"0" * 64}", ""]}}'.encode()
        accounts.remember_accounts(clinic.spec, clinic.account, body)
        assert not (folder_of(tmp_path, "clinic") / FILE).exists()
        monkeypatch.setattr(Statement, "said_by", lambda *_: True)  # the negative control
        accounts.remember_accounts(clinic.spec, clinic.account, body)
        assert Witness(folder_of(tmp_path, "clinic") / FILE).heard("ward")[0].entries == 10**6
        for odd in (b'{"ward": 3}', b"[" * 100_000):
            with pytest.raises(Exception, match=Code.MALFORMED):
                accounts.remember_accounts(clinic.spec, clinic.account, odd)


def test_who_made_it_up_is_told(tmp_path: Path) -> None:
    """A server that remembers what the silo never said: refused all the same, since the key may have changed."""
    with silos(tmp_path, 1) as held:
        ward = held["ward"]
        made_up = Statement("x", 10**6, "0" * 64)
        signed = made_up.signed(read_signing_key(key_of(tmp_path, "ward")), "ward")
        for one, lies in ((made_up, True), (signed, False)):
            said = accounts._own(ward.spec, ward.account, (one,))
            assert said is not None
            assert "put its account's folder back" in said
            assert ("the server lies" in said) == lies


def test_a_damaged_memory_is_no_blank_one(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(UserError, match="put it back as it was"):
        Witness(tmp_path / "w.json")
