"""The benchmark on the embedded digits: settings from public records, then test, then tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modicum.bench.pac_dp import methods
from modicum.bench.pac_dp.data import Folders, budgets, divided, without_private
from modicum.bench.pac_dp.play import play
from modicum.bench.pac_dp.report import report
from modicum.bench.pac_dp.run import bench
from modicum.bench.pac_dp.settings import TASKS, Preset, Task
from modicum.bench.pac_dp.transfer import transfer
from modicum.bench.pac_dp.tune import tune
from modicum.errors import UserError

TASK = Task(
    name="digits",
    title="Digits",
    backbone=None,
    clients=3,
    same=2.0,
    personal={1.0: 0.5, 8.0: 0.5},
    proxy=0.2,
    sizes=(0,),
    rounds=(2,),
    fit_budgets=(1.0, 8.0),
    lrs=(3.0,),
    seeds=1,
    paper={"same": 1.0, "personal": 1.0},
)
PRESET = Preset("tiny", ("digits",), 1, (0.2, 1.0), 1, None)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path, tmp_path / "cache")


def test_from_public_records_to_tables(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "digits", TASK)
    few = [r for r in methods.rows(TASK, PRESET.bounds) if r.name in ("AUTO-S", "FedAvg (no privacy)")]
    monkeypatch.setattr(methods, "rows", lambda task, bounds: tuple(few))  # noqa: ARG005
    monkeypatch.setattr("modicum.bench.pac_dp.tune.HOT_EPOCHS", 2)
    said: list[str] = []
    chosen = tune(TASK, PRESET, folders, tmp_path, "cpu", said.append)
    assert json.loads((tmp_path / "digits.json").read_text()) == chosen
    records = play(TASK, PRESET, chosen, folders, tmp_path, "cpu", said.append)
    (tmp_path / "results-digits.json").write_text(json.dumps(records))
    for record in records:
        if record["epsilon"] is not None:
            assert record["epsilon"][2] <= max(record["granted"])
    text = report(tmp_path)
    assert "| hot | PAC-DP |" in text
    assert "proxy only" in text
    assert "∞" in next(line for line in text.splitlines() if "FedAvg" in line)
    assert text.count("not run") >= 4  # the other tasks, and every cell without public records


def test_whoever_tunes_holds_no_test_record(folders: Folders) -> None:
    data = divided(TASK, folders)
    assert len(data.test) > 0
    assert len(without_private(data).test) == 0


def test_draws_divide_records_anew_and_leave_the_proxy(folders: Folders) -> None:
    task = replace(TASK, redraw=True)
    first, second = (without_private(divided(task, folders, draw)) for draw in (0, 1))
    assert np.array_equal(first.proxy.x, second.proxy.x)


def test_hospitals_draw_their_budgets() -> None:
    heart = TASKS["heart-disease"]
    drawn = {budgets(heart, "personal", 4, seed) for seed in range(20)}
    assert len(drawn) > 5
    assert {b for d in drawn for b in d} <= set(heart.personal)


def test_a_test_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage choose first"):
        bench("quick", ["test"], tmp_path, tmp_path, tmp_path / "c", only=["mnist"])
    with pytest.raises(UserError, match="unknown task"):
        bench("quick", ["report"], tmp_path, tmp_path, tmp_path / "c", only=["mnits"])


def test_an_empty_folder_says_not_run(tmp_path: Path) -> None:
    assert "not run" in transfer(tmp_path)[-1]
    assert "| cifar-10-resnet18 | AUTO-S | not run | not run |" in report(tmp_path)
