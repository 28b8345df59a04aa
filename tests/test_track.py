"""Logging to other people's pages: released and public values only, and a run outlives its trackers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import modicum as mo
from modicum.cli import run as command_line
from modicum.cli.app import app
from modicum.core.facts import Metric
from modicum.data.arrays import Arrays
from modicum.errors import UserError
from modicum.federation.records import RoundRecord
from modicum.report import track
from modicum.report.track import Heard, MLflow, TensorBoard, check_trackers, tracker_named


@dataclass
class Notes:
    """A tracker of one's own."""

    lines: list[Any] = field(default_factory=list)

    def start(self, name: str, settings: Mapping[str, str]) -> None:
        self.lines.append((name, dict(settings)))

    def round(self, number: int, values: Mapping[str, float]) -> None:
        self.lines.append((number, dict(values)))

    def finish(self) -> None:
        self.lines.append("end")


def federation(*, other_test_labels: bool = False) -> mo.Federation:
    made = mo.Federation.from_dataset("digits", clients=3, validation=0.2, proxy=0.1, budgets=2.0)
    if not other_test_labels:
        return made
    test = made.data.test
    shifted = Arrays(test.x, (np.asarray(test.y) + 1) % 10)
    return replace(made, data=replace(made.data, test=shifted))


def notes_of(folder: Path, **changes: Any) -> tuple[Notes, mo.Run]:
    notes = Notes()
    run = mo.train(
        federation(**changes),
        method="dp-sgd",
        rounds=2,
        metrics=(Metric("accuracy", 1, 20.0),),
        folder=folder / "run",
        watching=mo.Watching(track=[notes]),
    )
    return notes, run


def leaks(tmp_path: Path) -> bool:
    """Whether trackers hear of test records: the same run with other test labels must tell the same."""
    (first, run), (second, other) = notes_of(tmp_path / "a"), notes_of(tmp_path / "b", other_test_labels=True)
    assert run.accuracy != other.accuracy  # the figure that must not be told does change
    return first.lines != second.lines


def test_trackers_hear_what_was_released_and_no_ground_truth(tmp_path: Path) -> None:
    notes, run = notes_of(tmp_path / "own")
    name, settings = notes.lines[0]
    assert name == "run"
    assert settings["method"] == "dp-sgd"
    assert [number for number, _ in notes.lines[1:-1]] == [1, 2]
    assert notes.lines[-1] == "end"
    told = notes.lines[1][1]
    public = {"public/loss", "public/accuracy", "public/macro_f1"}
    assert set(told) == {"bound", "reserved", "answered", "released/accuracy", "released/accuracy_std"} | public
    assert told["released/accuracy"] == run.records[0].released["accuracy"]
    assert not leaks(tmp_path)


def test_a_tracker_that_is_told_everything_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = track.told

    def indiscreet(record: RoundRecord) -> dict[str, float]:
        return {**honest(record), **record.simulated}

    monkeypatch.setattr(track, "told", indiscreet)
    assert leaks(tmp_path)


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on() -> None:
    class Broken(Notes):
        def round(self, number: int, values: Mapping[str, float]) -> None:
            raise ConnectionError("nobody there")

    broken, notes = Broken(), Notes()
    heard = Heard([broken, notes])
    with pytest.warns(UserWarning, match="Broken is not told any more: nobody there"):
        heard.round(RoundRecord(0, {"a": 1.0}, None, {}, False, 0.5, {"loss": float("nan")}))
    heard.round(RoundRecord(1, {"a": 1.0}, 1, {}, False, 0.5, released={"macro F1": 0.5}))
    heard.each("finish")
    assert notes.lines == [
        (1, {"bound": 1.0, "reserved": 0.5}),  # NaN and secrets are not told
        (2, {"bound": 1.0, "reserved": 0.5, "answered": 1.0, "released/macro_F1": 0.5}),
        "end",
    ]
    assert broken.lines == []


class Recorder:
    """Stands in for a foreign client: notes every call."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.calls: list[Any] = [("made", arguments, named)]

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            return None if name.startswith("get") else SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        return call


def fake(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    stand_in = ModuleType(module)
    setattr(stand_in, name, Recorder)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_tensorboard_gets_scalars_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "torch.utils.tensorboard", "SummaryWriter")
    made = TensorBoard(tmp_path)
    made.start("run", {"method": "dp-sgd"})
    made.round(3, {"public/loss": 0.25})
    made.finish()
    calls = made._writer.calls
    assert calls[0] == ("made", (str(tmp_path / "run"),), {})
    assert ("add_scalar", ("public/loss", 0.25, 3), {}) in calls
    assert calls[-1] == ("close", (), {})


def test_mlflow_gets_metrics_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "mlflow", "MlflowClient")
    made = MLflow("file:///somewhere")
    made.start("run", {"method": "dp-sgd"})
    made.round(3, {"public/loss": 0.25})
    made.finish()
    calls = made._client.calls
    assert calls[0] == ("made", (), {"tracking_uri": "file:///somewhere"})
    assert ("log_param", ("r1", "method", "dp-sgd"), {}) in calls
    assert ("log_metric", ("r1", "public/loss", 0.25), {"step": 3}) in calls
    assert calls[-1] == ("set_terminated", ("r1",), {})


@pytest.mark.parametrize(
    "text", ["", "wandb", "tensorboard:", "mlflow:", ":x", "TensorBoard", "tensorboard folder"]
)
def test_a_tracker_that_nobody_knows(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="use tensorboard, tensorboard:FOLDER"):
        tracker_named(text)
    file = tmp_path / "e.toml"
    file.write_text('[data]\nname = "digits"\nclients = 2\n')
    assert command_line(app, ["run", str(file), "--track", text, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_would_be_written_on_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "MAKERS", dict.fromkeys(("tensorboard", "mlflow"), lambda *_: Notes()))
    check_trackers(["tensorboard:logs", "mlflow"], far=False)
    check_trackers(["mlflow:http://study:5000"], far=True)
    for local in ("tensorboard", "tensorboard:logs", "mlflow", "mlflow:file:///tmp"):
        with pytest.raises(UserError, match="written on another machine"):
            check_trackers([local], far=True)


def test_a_missing_package_is_said_before_anything_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    file = tmp_path / "e.toml"
    file.write_text('[data]\nname = "digits"\nclients = 2\n')
    assert command_line(app, ["run", str(file), "--track", "mlflow", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'modicum[track]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
