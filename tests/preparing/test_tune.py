"""Settings at a price: what is published tells nothing of the trials that lost, nor how many there were."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from modicum.cli.app import app
from modicum.errors import PrivacyWarning, UnsoundError, UserError
from modicum.preparing import tune as module
from modicum.preparing.look import look
from modicum.preparing.tune import tune
from modicum.privacy.chosen import Choice
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.verify import verify

TEXT = """
[data]
name = "breast-cancer"
clients = {clients}
validation = 0.3
seed = 0
[method]
name = "dp-sgd"
[run]
rounds = 3
evaluate_every = 3
[[run.metrics]]
name = "accuracy"
every = 2
noise_multiplier = 10.0
"""
GRID = ("method.lr=0.01,4",)


def write(folder: Path, clients: int = 1, text: str = TEXT) -> Path:
    (folder / "e.toml").write_text(text.format(clients=clients))
    return folder / "e.toml"


def published(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trials(monkeypatch: pytest.MonkeyPatch, drawn: list[tuple[int, int]]) -> None:
    """What the curator drew: settings and seeds."""
    monkeypatch.setattr(module._Search, "_drawn", lambda _: iter(drawn))


def test_the_winner_is_published_and_nothing_else(tmp_path: Path) -> None:
    found = tune(write(tmp_path), GRID, 6.0, folder=tmp_path / "w", mean=3.0)
    assert set(published(tmp_path / "w")) == {"config.toml", "model.safetensors", "selection.json"}
    assert verify(tmp_path / "w").matches
    assert 5.9 < found.epsilon <= 6.0
    assert found.winner in Choice.read(tmp_path / "w").settings
    assert (tmp_path / "w-curator" / "journal.json").exists()
    assert (tmp_path / "w-curator").stat().st_mode & 0o077 == 0


def test_what_is_published_does_not_depend_on_the_losers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same winner among one, two and four trials, first or last: the same bytes."""
    win, lose = (1, 1234), (0, 99)
    seen = []
    for i, drawn in enumerate(([win], [lose, win], [win, lose, (0, 7), (0, 8)])):
        trials(monkeypatch, drawn)
        place = tmp_path / str(i)
        place.mkdir()
        assert tune(write(place), GRID, 6.0, folder=place / "w").winner == {"method.lr": 4}
        seen.append(published(place / "w"))
    assert seen[0] == seen[1] == seen[2]
    # Negative control: a folder that names the trial by its number tells them apart.
    leaky = [{**files, "trial": str(n).encode()} for n, files in enumerate(seen)]
    assert leaky[0] != leaky[1]


def test_the_number_of_trials_follows_from_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn and written down before the first trial; after a crash the same ones are played."""
    played: list[int] = []

    def stop(*told: Any) -> Any:
        played.append(told[1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module._Search, "_played", stop)
        with pytest.raises(KeyboardInterrupt):
            tune(write(tmp_path), GRID, 6.0, folder=tmp_path / "w", seed=5)
    journal = (tmp_path / "w-curator" / "journal.json").read_bytes()
    assert played == [0]
    assert not (tmp_path / "w").exists()
    tune(write(tmp_path), GRID, 6.0, folder=tmp_path / "w", seed=5)
    assert (tmp_path / "w-curator" / "journal.json").read_bytes() == journal
    with pytest.raises(UserError, match="holds another search"):
        tune(write(tmp_path), GRID, 5.0, folder=tmp_path / "w", seed=5)
    # Trials that were played stay as they are: other plans would be certified than were followed.
    with pytest.raises(UserError, match="holds another search"):
        tune(write(tmp_path), GRID, 6.0, folder=tmp_path / "w", seed=5, options=["run.evaluate_every=1"])


def test_no_trial_at_all_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch, [])
    found = tune(write(tmp_path), GRID, 6.0, mean=2.0, law="poisson", folder=tmp_path / "w")
    assert found.winner is None
    assert set(published(tmp_path / "w")) == {"selection.json"}
    assert verify(tmp_path / "w").matches


@pytest.mark.parametrize("way", ["stopping", "public", "negative control"])
def test_of_losses_and_errors_the_least_wins(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch, [(0, 5), (1, 6)])
    if way == "negative control":
        monkeypatch.setattr(module, "SMALLER", frozenset())
    told = TEXT.replace('"accuracy"', '"bounded_loss"').replace("= 10.0", "= 2.0")
    file = write(tmp_path, text=told)
    if way == "public":
        rows = SimpleNamespace(rows=[{"score": 0.7}, {"score": 0.2}], main="loss")
        monkeypatch.setattr(module, "compare", lambda *_, **__: rows)
        found = tune(file, GRID, 6.0, way="public", public=file, folder=tmp_path / "w")
    else:
        found = tune(file, GRID, 6.0, folder=tmp_path / "w")
    assert found.winner == {"method.lr": 0.01 if way == "negative control" else 4}


def test_trials_that_told_no_score_are_published_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody answered in the rounds that tell it; a trial that has a score is better, whatever it is."""
    trials(monkeypatch, [(0, 5)])
    monkeypatch.setattr(module, "_told", lambda *_: math.nan)
    found = tune(write(tmp_path), GRID, 6.0, folder=tmp_path / "w")
    assert (found.winner, found.score) == ({"method.lr": 0.01}, None)
    assert Choice.read(tmp_path / "w").score is None
    assert verify(tmp_path / "w").matches
    assert module._better(-3.0, math.nan, "accuracy")
    assert not module._better(math.nan, math.nan, "loss")


def test_where_trials_are_seen_each_is_paid_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="they are seen by the server"):
        tune(write(tmp_path, clients=3), GRID, 6.0, folder=tmp_path / "w")
    found = tune(write(tmp_path, clients=3), GRID, 6.0, way="split", folder=tmp_path / "w")
    choice = Choice.read(tmp_path / "w")
    assert verify(tmp_path / "w").matches
    assert 5.9 < found.epsilon <= 6.0
    alone = choice.plans["client-00"][0].budget
    assert alone < 6.0 / 2**0.4  # two trials of this budget are the whole


def test_on_stand_ins_nothing_is_paid_for_the_choice(tmp_path: Path) -> None:
    file = write(tmp_path)
    public = tmp_path / "public.toml"
    public.write_text(
        '[data]\nname = "breast-cancer"\nclients = 1\n[method]\nname = "dp-sgd"\n[run]\nrounds = 2\n'
    )
    found = tune(file, GRID, 6.0, way="public", public=public, folder=tmp_path / "w")
    assert "chosen on stand-ins" in found.warning
    assert found.winner in ({"method.lr": 4}, {"method.lr": 0.01})
    assert verify(found.folder).matches


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grid", "privacy.delta=1e-5,1e-6", "--epsilon", 3), "settings of method"),
        (("--grid", GRID[0], "--epsilon", 3, "--way", "luck"), "unknown way"),
        (("--grid", GRID[0], "--epsilon", 3, "--way", "public"), "--public"),
        (("--grid", GRID[0], "--epsilon", 3, "--law", "normal"), "logarithmic, geometric, poisson"),
        (("--grid", GRID[0], "--epsilon", 3, "--way", "split", "--mean", 2), "leave --mean out"),
        (("--grid", GRID[0], "--epsilon", 3, "--way", "public", "--law", "poisson"), "a law is one of"),
        (("--grid", GRID[0], "--epsilon", 3, "--mean", "nan"), "mean"),
        (("--grid", "method.lr=1", "--epsilon", 3), "nothing to choose"),
        (("--grid", GRID[0], "--epsilon", 0.01), "cannot be met"),
        (("--grid", GRID[0], "--epsilon", 3, "--set", "run.metrics=[]"), "declare one"),
        (("--grid", GRID[0], "--epsilon", 3, "--set", "run.rounds=2"), "a model that nobody has trained"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: tuple[Any, ...], said: str) -> None:
    line = ["tune", str(write(tmp_path)), *map(str, words), "--out", str(tmp_path / "w")]
    done = CliRunner().invoke(app, line)
    assert isinstance(done.exception, UserError), done.output
    assert said in str(done.exception)
    assert not (tmp_path / "w").exists()


def test_the_command_tells_no_number_of_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for i, drawn in enumerate(([(1, 5)], [(0, 3), (1, 5)])):
        trials(monkeypatch, drawn)
        place = tmp_path / str(i)
        place.mkdir()
        line = [
            "tune",
            str(write(place)),
            "--grid",
            GRID[0],
            "--epsilon",
            "6",
            "--out",
            str(place / "w"),
            "--json",
        ]
        told = json.loads(CliRunner().invoke(app, line).stdout)
        outputs.append({name: value for name, value in told.items() if name != "folder"})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("way", ["stopping", "split"])
def test_no_warning_counts_the_trials(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real noise each trial stands beside others on the same records, and a run says so."""
    trials(monkeypatch, [(0, 3), (1, 5), (1, 7)] if way == "stopping" else [(0, 3), (1, 5)])
    file = write(tmp_path, text=TEXT.replace("[run]", "[run]\nsimulation = false"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tune(file, GRID, 6.0, way=way, folder=tmp_path / "w")
    assert not [one for one in said if issubclass(one.category, PrivacyWarning)]
    if way == "stopping":
        assert not said


def test_a_hidden_search_draws_on_no_account(tmp_path: Path) -> None:
    """Its draws would tell how many trials there were; paid in full each draws its own."""
    account = f'[account]\nbudget = 50.0\nfolder = "{tmp_path / "account"}"\n'
    file = write(tmp_path, text=TEXT + account)
    with pytest.raises(UserError, match="how many trials"):
        tune(file, GRID, 6.0, folder=tmp_path / "w")
    tune(file, GRID, 6.0, way="split", folder=tmp_path / "s")
    with DatasetAccount.open(tmp_path / "account", read_only=True) as kept:
        assert len(kept.draws) == 2


def test_a_search_takes_no_look(tmp_path: Path) -> None:
    """Settings listed after it change the noise of trials: the plan that stood in the file was another."""
    lines = [f"one,{i % 7 / 7:.3f},{i % 2}" for i in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["client,a,label", *lines]))
    table = f'csv = "{tmp_path / "t.csv"}"\nclasses = 2\nstandardise = "l"'
    columns = "[data.columns]\na = {{ range = [0, 1] }}\n[privacy]\nbudgets = 6.0\n[method]"
    text = TEXT.replace('name = "breast-cancer"', table).replace("[method]", columns)
    file = write(tmp_path, text=text)
    look(file, 1.0, folder=tmp_path / "l")
    with pytest.raises(UnsoundError, match="after a look"):
        tune(file, GRID, 6.0, folder=tmp_path / "w")
