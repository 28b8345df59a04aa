"""A silo's account: every run draws on it before anything else, and no new folder or edit starts afresh."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from modicum.cli.app import app
from modicum.deploy.silo import silo as silo_module
from modicum.deploy.silo.account import Exempt, SiloAccount
from modicum.deploy.silo.silo import JOINED, Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import Code
from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.privacy.ledger import Ledger
from modicum.privacy.lifetime import DrawRefused
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.verify import verify
from tests.deploy.silo.helpers import EXPERIMENT, Server, charged_rounds, opened, write_silo

TABLE = EXPERIMENT.replace("batch = 32", "batch = 16")
CLIENT_LEVEL = TABLE.replace('name = "dp-sgd"', 'name = "aqc"\nlevel = "client"')
NAMES = ("clinic", "ward")
LIFETIME = "\n[account]\nbudget = {budget}\n"


def records(seed: int = 3, n: int = 120) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}


def ward(
    root: Path,
    run: str,
    *,
    lifetime: float | None = 2.5,
    table: dict[str, np.ndarray] | None = None,
    budget: float = 2.0,
    extra: str = "",
    experiment: str = TABLE,
    grant: str = "bounds = [0.01, 10.0]",
    account: str = "",
) -> Path:
    """A silo's folder for one run. The data lie beside the folders, and so does their account, by default."""
    data = root / "data"
    data.mkdir(parents=True, exist_ok=True)
    np.savez(data / "ward.npz", **(table or records()))
    tables = f'\n[data]\nnpz = "../data"\nclasses = 2\n{extra}'
    text = LIFETIME.format(budget=lifetime) if lifetime else "\n[account]\n"
    return write_silo(
        root / run, "ward", experiment=experiment, budget=budget, data=tables + text + account, grant=grant
    )


def join(path: Path, run: str, rounds: int = 0) -> Code | None:
    with opened(path) as server:
        return take_part(server, run, rounds)


def take_part(server: Server, run: str, rounds: int = 0) -> Code | None:
    server.names, server.run = NAMES, run
    answer = server.join()
    for round in range(rounds):
        assert server.propose(round).refused is None
    return answer.refused


def state(path: Path) -> Path:
    return path.parent / "state-ward"


def account_of(root: Path) -> DatasetAccount:
    return DatasetAccount.open(root / "account-ward")


def test_runs_in_new_folders_draw_on_the_same_grant_until_it_is_used_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(ward(tmp_path, "a")) as server:
        assert take_part(server, "run-a", rounds=4) is None
    second = ward(tmp_path, "b")
    with caplog.at_level(logging.WARNING, "modicum.silo"):
        assert join(second, "run-b") is Code.BUDGET
    (said,) = [r.getMessage() for r in caplog.records if "account" in r.getMessage()]
    assert "asks" in said
    assert "is left for the most-spent of its records: plan fewer rounds" in said
    assert not (state(second) / JOINED).exists()
    assert charged_rounds(second) == set()
    assert join(ward(tmp_path, "c", budget=0.8), "run-c") is None  # what still fits
    with account_of(tmp_path) as account:
        assert list(account.draws) == ["run-a", "run-c"]


def test_the_old_silo_gave_every_run_a_fresh_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control keeps no account: run after run joins, on the same records."""
    monkeypatch.setattr(silo_module, "account_of", lambda *_: Exempt("none"))
    assert [join(ward(tmp_path, run), run) for run in "abcd"] == [None] * 4


def test_without_a_stated_lifetime_the_second_run_is_refused(tmp_path: Path) -> None:
    assert join(ward(tmp_path, "a", lifetime=None), "run-a", rounds=1) is None
    assert join(ward(tmp_path, "b", lifetime=None, budget=0.1), "run-b") is Code.BUDGET
    with pytest.raises(UserError, match=r"opened with one run for each record.* a lifetime grant never changes"):
        Silo(read_spec(ward(tmp_path, "c", lifetime=8.0)))


def test_joining_again_and_restarting_draw_nothing_more(tmp_path: Path) -> None:
    path = ward(tmp_path, "a")
    with opened(path) as server:
        assert take_part(server, "run-a", rounds=2) is None
        assert take_part(server, "run-a") is None
    with opened(path) as server:
        server.names, server.run = NAMES, "run-a"
        assert server.propose(2).refused is None
    with account_of(tmp_path) as account:
        assert list(account.draws) == ["run-a"]


class Stopped(BaseException):
    """A crash."""


@pytest.mark.parametrize("where", ["write_durably", "TakingPart"])
def test_a_crash_on_joining_draws_once(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise Stopped

    path = ward(tmp_path, "a")
    with opened(path) as server, monkeypatch.context() as broken:
        server.card()  # its folder has a ticket
        broken.setattr(silo_module, where, crash)
        with pytest.raises(Stopped):
            take_part(server, "run-a")
    with account_of(tmp_path) as account:
        assert list(account.draws) == ["run-a"]  # drawn before anything else was written
    assert not (state(path) / "ledger.sqlite").exists()
    assert join(path, "run-a") is None
    with account_of(tmp_path) as account:
        assert list(account.draws) == ["run-a"]


def test_what_is_held_is_on_disk_before_the_ledger_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a silo that held only afterwards is found out by the same look."""
    seen: list[bool] = []
    look = silo_module.RunFolder.open_ledger

    def watched(self: Any, run: str, *rest: Any, **named: Any) -> Any:
        folder = tmp_path / "account-ward"
        with_hold = (folder / "account.sqlite").exists() and run in DatasetAccount.open(folder).draws
        seen.append(with_hold)
        return look(self, run, *rest, **named)

    monkeypatch.setattr(silo_module.RunFolder, "open_ledger", watched)
    assert join(ward(tmp_path, "a"), "run-a") is None
    with monkeypatch.context() as broken:
        broken.setattr(SiloAccount, "hold", lambda *_: None)  # the negative control would hold later
        broken.setattr(SiloAccount, "remember", lambda *_: None)
        broken.setattr(SiloAccount, "statement", lambda *_: {"kept": False, "sentence": ""})
        assert join(ward(tmp_path, "b"), "run-b") is None
    assert seen == [True, False]


def test_a_ledger_that_is_lost_or_older_is_refused(tmp_path: Path) -> None:
    path = ward(tmp_path, "a")
    with opened(path) as server:
        assert take_part(server, "run-a", rounds=1) is None
    shutil.copytree(state(path), tmp_path / "older")
    with opened(path) as server:
        server.names, server.run = NAMES, "run-a"
        assert server.propose(1).refused is None
    shutil.copytree(state(path), tmp_path / "latest")
    (state(path) / "ledger.sqlite").unlink()
    with pytest.raises(UserError, match=r"ledger.sqlite is missing, and the account remembers 6 entries"):
        Silo(read_spec(path))
    shutil.rmtree(state(path))
    shutil.copytree(tmp_path / "older", state(path))
    with pytest.raises(UserError, match="an older copy, or not the ledger that the account remembers at entry 6"):
        Silo(read_spec(path))
    shutil.rmtree(state(path))
    with pytest.raises(UserError, match="is missing, and the account remembers"):
        take_part_or_raise(path, "run-a")
    shutil.rmtree(state(path))
    shutil.copytree(tmp_path / "latest", state(path))
    Silo(read_spec(path)).close()


def take_part_or_raise(path: Path, run: str) -> None:
    """As the operator's log would have it: the wire says only `unavailable`."""
    with opened(path) as server:
        server.names, server.run = NAMES, run
        assert server.silo is not None
        assert server.join().refused is Code.UNAVAILABLE
        server.silo._join(server.invitation().encode())


def test_a_lost_ledger_of_a_simulation_is_refused_as_well(tmp_path: Path) -> None:
    path = write_silo(tmp_path, simulation=True)
    with opened(path) as server:
        assert server.join().refused is None
    (tmp_path / "state-client-00" / "ledger.sqlite").unlink()
    with pytest.raises(UserError, match="is missing, and a run began here"):
        Silo(read_spec(path))


def test_a_lost_or_older_account_is_refused(tmp_path: Path) -> None:
    first, second = ward(tmp_path, "a", lifetime=8.0), ward(tmp_path, "b", lifetime=8.0)
    assert join(first, "run-a") is None
    shutil.copytree(tmp_path / "account-ward", tmp_path / "older")
    assert join(second, "run-b") is None
    shutil.move(tmp_path / "account-ward", tmp_path / "kept")
    with pytest.raises(UserError, match="drew on an account that is not in"):
        Silo(read_spec(second))
    shutil.move(tmp_path / "older", tmp_path / "account-ward")
    with pytest.raises(UserError, match="is an older copy, without this run's draw"):
        Silo(read_spec(second))
    shutil.rmtree(tmp_path / "account-ward")
    assert join(ward(tmp_path / "elsewhere", "a", lifetime=8.0), "run-a") is None
    shutil.copytree(tmp_path / "elsewhere" / "account-ward", tmp_path / "account-ward")
    with pytest.raises(UserError, match="drew on another account"):
        Silo(read_spec(second))


def test_a_run_that_never_began_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It joined and was never asked. The next run joins; the first finds its hold gone, and reserves nothing."""
    first, second = ward(tmp_path, "a"), ward(tmp_path, "b")
    assert join(first, "run-a") is None
    shown = CliRunner().invoke(app, ["silo", "account", str(first)]).output
    assert "held       counts like a draw" in shown
    with opened(first) as waiting, caplog.at_level(logging.INFO, "modicum.silo"):
        assert join(second, "run-b", rounds=1) is None
        assert "run run-a never reserved anything" in caplog.text
        waiting.names, waiting.run = NAMES, "run-a"
        assert waiting.propose(0).refused is Code.BUDGET
        assert charged_rounds(first) == set()
    with pytest.raises(UserError, match=r"'run-a' asks .* is left"):
        Silo(read_spec(first))
    with account_of(tmp_path) as account:
        assert [draw.run for draw in account.draws.values() if draw.counts] == ["run-b"]


def afford(silo: Silo | None) -> None:
    assert silo is not None
    silo.account.afford(silo.terms(NAMES).plan(replace(silo.facts, participations=4)))


def test_a_run_in_a_folder_that_is_at_work_keeps_what_it_holds(tmp_path: Path) -> None:
    first, second = ward(tmp_path, "a"), ward(tmp_path, "b")
    assert join(first, "run-a") is None
    with RunFolder(state(first)).alone():
        assert join(second, "run-b") is Code.BUDGET
        with opened(second) as server, pytest.raises(DrawRefused):
            afford(server.silo)
    with opened(second) as server:
        afford(server.silo)  # as `silo check` asks: the hold would lapse
    assert join(second, "run-b") is None


def test_a_run_draws_before_its_first_reservation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that would reserve first is found out by the same look."""
    seen: list[str] = []
    reserve = Ledger.reserve

    def watched(self: Ledger, *rest: Any, **named: Any) -> Any:
        with DatasetAccount.open(tmp_path / "account-ward", read_only=True) as account:
            seen.append(account.draws[self.run_id].state)
        return reserve(self, *rest, **named)

    monkeypatch.setattr(Ledger, "reserve", watched)
    with opened(ward(tmp_path, "a", lifetime=8.0)) as server:
        assert take_part(server, "run-a", rounds=2) is None
    assert set(seen) == {"drawn"}
    with opened(ward(tmp_path, "b", lifetime=8.0)) as server, monkeypatch.context() as broken:
        broken.setattr(SiloAccount, "draw", lambda *_: None)  # the negative control
        seen.clear()
        assert take_part(server, "run-b", rounds=1) is None
        assert set(seen) == {"held"}


def test_the_same_run_in_a_second_folder_is_refused(tmp_path: Path) -> None:
    """A server that invites to a known run again gets no second ledger for one draw."""
    with opened(ward(tmp_path, "a")) as server:
        assert take_part(server, "run-a", rounds=1) is None
    copytree(tmp_path / "a" / "keys", tmp_path / "b" / "keys")
    with pytest.raises(UserError, match="is missing, and the account remembers"):
        take_part_or_raise(ward(tmp_path, "b"), "run-a")


def test_edited_records_inherit_and_a_run_goes_on_with_its_own(tmp_path: Path) -> None:
    path = ward(tmp_path, "a")
    with opened(path) as server:
        assert take_part(server, "run-a", rounds=1) is None
    edited = records()
    edited["x"] = edited["x"][:, ::-1] * np.float32(1.5)
    assert join(ward(tmp_path, "b", table=edited), "run-b") is Code.BUDGET
    with pytest.raises(UserError, match="the records have changed since run 'run-a' drew"):
        Silo(read_spec(path))
    ward(tmp_path, "a")  # puts them back
    Silo(read_spec(path)).close()


def test_ids_let_new_patients_in_and_old_ones_not(tmp_path: Path) -> None:
    extra = 'id_column = "patient"\n'

    def patients(first: int, seed: int) -> dict[str, np.ndarray]:
        return {**records(seed), "patient": np.arange(first, first + 120)}

    assert join(ward(tmp_path, "a", table=patients(0, 1), extra=extra), "run-a", rounds=1) is None
    assert join(ward(tmp_path, "b", table=patients(119, 2), extra=extra), "run-b") is Code.BUDGET
    assert join(ward(tmp_path, "c", table=patients(120, 3), extra=extra), "run-c") is None
    with pytest.raises(UserError, match="knows records by their id"):
        Silo(read_spec(ward(tmp_path, "d", table=patients(0, 1))))
    renamed = {**patients(0, 1), "visit": np.arange(120) + 1000}
    with pytest.raises(UserError, match="by their id in 'patient' and the silo's file says id in 'visit'"):
        Silo(read_spec(ward(tmp_path, "f", table=renamed, extra='id_column = "visit"\n')))
    with pytest.raises(UserError, match="needs an array 'patient' with one id per record"):
        take_part_or_raise(ward(tmp_path, "e", table=records(), extra=extra), "run-e")


def test_a_client_level_run_costs_every_record_and_a_record_level_run_never_fits_a_client(tmp_path: Path) -> None:
    unit = 'unit = "client"\nbounds = [0.01, 10.0]'
    path = ward(
        tmp_path, "a", lifetime=8.0, experiment=CLIENT_LEVEL, grant=unit, account='unit = "record"\n', budget=1.0
    )
    assert join(path, "run-a") is None
    with account_of(tmp_path) as account:
        assert str(account.lifetime.filter) == "gdp"  # nothing is sampled
        assert account.draws["run-a"].records == 120
    other = tmp_path / "other"
    assert join(ward(other, "a", experiment=CLIENT_LEVEL, grant=unit), "run-a") is None
    assert join(ward(other, "b", account='unit = "client"\n', budget=0.1), "run-b") is Code.BUDGET


def test_the_certificate_states_the_cap_apart_and_verifies(tmp_path: Path) -> None:
    path = ward(tmp_path, "a")
    with opened(path) as server:
        assert take_part(server, "run-a", rounds=4) is None
    file = state(path) / "certificate.json"
    said = json.loads(file.read_text())
    assert (said["account"]["kept"], said["account"]["epsilon"], said["account"]["filter"]) == (True, 2.5, "rdp")
    assert said["clients"]["ward"]["epsilon"] <= 2.0  # the run's own figure stays its own
    assert "left" not in said["account"]  # it depends on the records
    assert verify(state(path)).matches
    said["account"]["epsilon"] = 1.0
    file.write_text(json.dumps(said))
    assert any("account" in problem for problem in verify(state(path)).problems)


def test_public_data_and_simulations_are_exempt_and_say_so(tmp_path: Path) -> None:
    for name, simulation, said in (
        ("public", False, "'digits' are public data"),
        ("simulated", True, "the noise is simulated"),
    ):
        path = write_silo(tmp_path / name, simulation=simulation)
        with opened(path) as server:
            assert server.join().refused is None
        text = json.loads((tmp_path / name / "state-client-00" / "certificate.json").read_text())
        assert text["account"]["kept"] is False
        assert said in text["account"]["sentence"]
        assert said in CliRunner().invoke(app, ["silo", "account", str(path)]).output
        assert verify(tmp_path / name / "state-client-00").matches
    assert list(tmp_path.glob("*/account-*")) == []


def test_records_with_an_account_are_not_simulated_with(tmp_path: Path) -> None:
    path = ward(tmp_path, "a")
    pretend = path.read_text().replace("simulation = false", "simulation = true")
    (tmp_path / "a" / "pretend.toml").write_text(pretend)
    Silo(read_spec(tmp_path / "a" / "pretend.toml")).close()  # a try-out before there is an account
    assert join(path, "run-a") is None
    with pytest.raises(UserError, match="simulated noise would tell about them without end"):
        Silo(read_spec(tmp_path / "a" / "pretend.toml"))


def test_the_account_as_a_table_and_for_scripts(tmp_path: Path) -> None:
    path = ward(tmp_path, "a", lifetime=8.0)
    runner = CliRunner()
    assert "nothing is drawn yet" in runner.invoke(app, ["silo", "account", str(path)]).output
    assert join(path, "run-a") is None
    shown = runner.invoke(app, ["silo", "account", str(path)]).output
    assert "(8, 1e-05)-differentially private" in shown
    assert "run-a" in shown
    assert "left" in shown
    assert runner.invoke(app, ["silo", "check", str(path)]).output.endswith(shown)
    found = json.loads(runner.invoke(app, ["silo", "account", str(path), "--json"]).output)
    (draw,) = found["draws"]
    assert (draw["run"], draw["records"], draw["budget"], found["epsilon"]) == ("run-a", 120, 2.0, 8.0)
    assert found["left"] == pytest.approx(1 - draw["share"])


def test_an_operator_s_mistake_is_one_line(tmp_path: Path) -> None:
    for text, said in {
        "budget = -1": "a lifetime budget must be positive",
        "delta = 2.0": "delta between 0 and 1",
        'filter = "gdp"\norder = 3.0': "belongs to the rdp filter",
        'folder = "state-client-00/account"': "an account outlives a run",
        "bugdet = 3": "did you mean 'budget'",
    }.items():
        with pytest.raises(UserError, match=said) as error:
            read_spec(write_silo(tmp_path, data=f"\n[account]\n{text}\n"))
        assert "\n" not in str(error.value)
