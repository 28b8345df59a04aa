"""Runs that pause within their plan, and runs that begin with the model of another."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import modicum as mo
from modicum.cli.app import app
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError
from modicum.federation.model_file import start_line
from modicum.federation.run_folder import RunFolder
from modicum.methods import DpSgd
from modicum.privacy.lifetime import APART
from modicum.privacy.lifetime.account import DatasetAccount


def wards(seed: int = 0) -> FederatedData:
    rng = np.random.default_rng(seed)

    def records(n: int) -> Arrays:
        x = rng.normal(size=(n, 3)).astype(np.float32)
        return Arrays(x, (x[:, 0] > 0).astype(np.int64))

    nothing = records(0)
    own = tuple(ClientData(name, records(12), nothing, nothing) for name in ("north", "south"))
    return FederatedData("wards", own, records(8), 2, nothing, nothing, 0)


def run(folder: Path, **more: object) -> mo.Run:
    settings = {"budgets": 2.0, "method": DpSgd(steps=1), "rounds": 4, **more}
    return mo.train(wards(), folder=folder, **settings)  # type: ignore[arg-type]


def test_a_paused_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    paused = run(tmp_path / "run", watching=mo.Watching(until=2))
    assert (paused.summary.rounds, paused.summary.rounds_planned) == (2, 4)
    assert paused.certificate.epsilon("north") == whole.certificate.epsilon("north")  # of the whole plan
    assert mo.verify(tmp_path / "run").matches
    done = run(tmp_path / "run", resume=True)
    assert done.summary.rounds == 4
    assert all(torch.equal(done.parameters[name], value) for name, value in whole.parameters.items())
    assert done.certificate.epsilon("north") == whole.certificate.epsilon("north")
    assert mo.verify(tmp_path / "run").matches


def test_nothing_is_granted_beyond_the_plan(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="4 rounds are planned"):
        run(tmp_path / "a", watching=mo.Watching(until=5))
    run(tmp_path / "b", watching=mo.Watching(until=2))
    with pytest.raises(UserError, match="2 rounds of this run are done"):
        run(tmp_path / "b", resume=True, watching=mo.Watching(until=1))
    with pytest.raises(UserError):  # the same run with more rounds is another run
        run(tmp_path / "b", resume=True, rounds=8)


def test_a_run_begins_with_the_model_of_another(tmp_path: Path) -> None:
    first = run(tmp_path / "first")
    still = DpSgd(steps=1, lr=1e-12)
    again = run(tmp_path / "again", server=mo.Server(start=str(tmp_path / "first")), method=still)
    anew = run(tmp_path / "anew", method=still)
    for name, value in first.parameters.items():
        torch.testing.assert_close(again.parameters[name], value, rtol=0, atol=1e-6)
        assert not torch.allclose(anew.parameters[name], value, atol=1e-3)
    assert again.certificate.epsilon("north") <= 2.0  # of its own releases alone, and it says so
    assert "both runs add up" in again.summary.note
    assert "after 4 rounds" in start_line(str(tmp_path / "first"))
    assert again.certificate.to_dict()["run"] != anew.certificate.to_dict()["run"]


def test_what_no_run_can_begin_with_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run"):
        run(tmp_path / "a", server=mo.Server(start=str(tmp_path / "nowhere")))
    run(tmp_path / "first")
    with pytest.raises(UserError, match="other layers"):
        run(tmp_path / "b", model="mlp", server=mo.Server(start=str(tmp_path / "first")))


def test_runs_on_the_same_records_share_one_grant(tmp_path: Path) -> None:
    """Two runs of ε = 2 fit into 3, a third does not; another division of the same records is no way round."""
    grant = mo.Account(budget=3.0, folder=str(tmp_path / "account"))
    whole = run(tmp_path / "1", account=grant)
    run(tmp_path / "2", account=grant, seed=1)
    for more in ({"seed": 2}, {"seed": 3, "budgets": 1.9}):
        with pytest.raises(UserError, match="of the lifetime grant"):
            run(tmp_path / f"no-{more['seed']}", account=grant, **more)
    assert run(tmp_path / "3", account=grant, seed=4, budgets=0.1).certificate.epsilon("north") <= 0.1
    again = run(tmp_path / "1", account=grant, resume=True)  # drawn before: not drawn twice
    assert again.summary.rounds == whole.summary.rounds
    with DatasetAccount.open(tmp_path / "account", read_only=True) as kept:
        assert len(kept.draws) == 3
        assert kept.overview()["draws"][0]["records"] == 24  # of both clients
    with pytest.raises(UserError, match="never changes"):
        run(tmp_path / "5", account=mo.Account(budget=30.0, folder=grant.folder), seed=5)


def test_the_owner_s_page_says_what_each_run_was_and_took(tmp_path: Path) -> None:
    grant = mo.Account(budget=3.0, folder=str(tmp_path / "account"))
    certificate = run(tmp_path / "1", account=grant).certificate
    told = CliRunner().invoke(app, ["account", "plan", "--account", grant.folder]).output
    (line,) = [line.split() for line in told.splitlines() if line.startswith(certificate.run)]
    with DatasetAccount.open(tmp_path / "account", read_only=True) as kept:
        share = kept.overview()["draws"][0]["share"]
    assert float(line[2]) == pytest.approx(certificate.epsilon("north"), rel=0.01)
    assert float(line[3].rstrip("%")) == pytest.approx(100 * share, abs=0.1)
    assert "a next run of at most ε = " in told


def test_records_that_move_between_clients_have_spent_what_they_have(tmp_path: Path) -> None:
    """Broken version: an account for each client, which knows nothing of what its records spent elsewhere."""
    grant = mo.Account(budget=2.5, folder=str(tmp_path / "account"))
    data = wards()
    north, south = data.clients
    swapped = replace(data, clients=(replace(north, train=south.train), replace(south, train=north.train)))
    settings = {"budgets": 2.0, "method": DpSgd(steps=1), "rounds": 2, "account": grant}
    mo.train(data, folder=tmp_path / "1", **settings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="of the lifetime grant"):
        mo.train(swapped, folder=tmp_path / "2", seed=1, **settings)  # type: ignore[arg-type]


def test_real_noise_says_that_an_account_was_drawn_on(tmp_path: Path) -> None:
    done = run(tmp_path / "run", account=mo.Account(budget=3.0, folder=str(tmp_path / "a")), simulation=False)
    assert done.certificate.account["sentence"] == APART
    assert mo.verify(tmp_path / "run").matches


def test_the_same_file_with_real_noise_is_paid_for_each_time(tmp_path: Path) -> None:
    """Another folder draws other noise: it is another run, and whoever averages them pays for all."""
    real = {"account": mo.Account(budget=3.0, folder=str(tmp_path / "account")), "simulation": False}
    one, other = run(tmp_path / "1", **real), run(tmp_path / "2", **real)
    assert not all(torch.equal(other.parameters[name], value) for name, value in one.parameters.items())
    with DatasetAccount.open(tmp_path / "account", read_only=True) as kept:
        assert set(kept.draws) == {made.certificate.to_dict()["run"] for made in (one, other)}
        assert len(kept.draws) == 2
    with pytest.raises(UserError, match="of the lifetime grant"):
        run(tmp_path / "3", **real)
    assert run(tmp_path / "1", **real, resume=True).summary.rounds == 4


def test_an_older_copy_of_an_account_is_noticed(tmp_path: Path) -> None:
    """What a run drew with real noise stands in its own folder too, and so does whose account it was."""
    real = {"account": mo.Account(budget=3.0, folder=str(tmp_path / "account")), "simulation": False}
    run(tmp_path / "runs" / "1", **real)
    shutil.copytree(tmp_path / "account", tmp_path / "before")
    run(tmp_path / "runs" / "2", **real)
    for gone in (False, True):
        shutil.rmtree(tmp_path / "account")
        if not gone:
            shutil.copytree(tmp_path / "before", tmp_path / "account")
        for name in ("2", f"3 {gone}"):
            with pytest.raises(UserError, match=r"an older copy|is not in"):
                run(tmp_path / "runs" / name, **real, resume=name == "2")


def test_a_copy_of_a_run_draws_no_second_noise(tmp_path: Path) -> None:
    real = {"account": mo.Account(budget=3.0, folder=str(tmp_path / "account")), "simulation": False}
    run(tmp_path / "1", **real, watching=mo.Watching(until=2))
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    run(tmp_path / "1", **real, resume=True)
    with pytest.raises(UserError, match="an older copy"):
        run(tmp_path / "2", **real, resume=True)


def test_a_model_of_persons_predicts_rows(tmp_path: Path) -> None:
    lines = [f"ward,P{p},{age / 90},{int(age > 50)}" for p in range(20) for age in (30 + p, 45 + p)]
    (tmp_path / "v.csv").write_text("\n".join(["client,who,age,label", *lines]))
    persons = mo.in_persons(mo.from_csv(tmp_path / "v.csv", person="who", classes=2), rows=3)
    made = mo.train(mo.federate(persons), budgets=2.0, method="dp-sgd", rounds=2, folder=tmp_path / "run")
    rows = np.array([[0.4], [0.9], [0.6], [0.1]], np.float32)
    assert made.predict(rows).shape == (4,)
    assert (mo.load(tmp_path / "run").predict(rows) == made.predict(rows)).all()


def test_a_pause_keeps_the_key_of_correlated_noise(tmp_path: Path) -> None:
    """Destroyed when the run ends, and not before: later rounds' noise takes back that of earlier ones."""
    noise, method = mo.Noise(kind="correlated"), mo.methods.DpFedAvg(view="trusted-server")
    whole = run(tmp_path / "whole", method=method, noise=noise, simulation=False)
    folder = tmp_path / "elsewhere" / "run"  # not beside the first, of the same records
    run(folder, method=method, noise=noise, simulation=False, watching=mo.Watching(until=2))
    key = RunFolder(folder).noise_key
    assert key.exists()
    done = run(folder, method=method, noise=noise, simulation=False, resume=True)
    assert done.summary.rounds == whole.summary.rounds == 4
    assert not key.exists()
    assert mo.verify(folder).matches
