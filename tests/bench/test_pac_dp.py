"""The benchmark on the embedded digits: settings from public records, then test, then tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modicum.cli.progress import counting
from modicum.data import load
from modicum.errors import UserError
from modicum.methods import DpSgd
from modicum.models.backbone import BackboneShape, load_backbone
from modicum.public.pretrain import Pretraining
from modicum_bench.pac_dp import cells, methods, printed, scratch
from modicum_bench.pac_dp.backbones import RECIPES, Recipe, ensure
from modicum_bench.pac_dp.cells import Cell, Workspace, judged, runner
from modicum_bench.pac_dp.data import Folders, budgets, divided, first_model, without_private
from modicum_bench.pac_dp.figures import draw_all
from modicum_bench.pac_dp.play import play
from modicum_bench.pac_dp.report import not_run, report
from modicum_bench.pac_dp.run import bench
from modicum_bench.pac_dp.scratch import choose_scratch, play_scratch
from modicum_bench.pac_dp.settings import PRESETS, TASKS, Preset, Task
from modicum_bench.pac_dp.transfer import transfer
from modicum_bench.pac_dp.tune import tune

TASK = Task(
    name="digits",
    title="Digits",
    backbones=(),
    clients=3,
    same=2.0,
    personal={1.0: 0.5, 8.0: 0.5},
    proxy=0.2,
    features=("whitened-8", "discriminant-9"),
    rounds=(2,),
    fit_budgets=(1.0, 8.0),
    rates=(1.0, 10.0),
    target=0.05,
    adam=True,
    seeds=1,
    paper={"same": 1.0, "personal": 1.0},
)
PRESET = Preset("tiny", ("digits",), 4, (0.2, 1.0, 2.0), scratch=False)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path, tmp_path / "cache")


@pytest.mark.heavy
def test_from_public_records_to_tables(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "digits", TASK)
    few = [r for r in methods.rows(TASK, PRESET.bounds) if r.name in ("fixed C=1", "FedAvg (no privacy)")]
    monkeypatch.setattr(methods, "rows", lambda task, bounds: tuple(few))
    adam = methods.adam_rows
    monkeypatch.setattr(methods, "adam_rows", lambda bounds, curve: adam(bounds, curve)[:1])
    said: list[str] = []
    place = Workspace(folders)
    with runner(place, 1) as run:
        chosen = tune(TASK, PRESET, place, tmp_path, run, said.append)
        assert tune(TASK, PRESET, place, tmp_path, lambda *_: pytest.fail("known already"), said.append) == chosen
        assert json.loads((tmp_path / "digits.json").read_text()) == chosen
        assert chosen["starts"]["cold"]["features"] == "whitened-8"  # the other one has seen labels
        records = play(TASK, PRESET, chosen, tmp_path, run, said.append)
        assert play(TASK, PRESET, chosen, tmp_path, lambda *_: pytest.fail("known already"), said.append) == (
            json.loads((tmp_path / "results-digits.json").read_text())
        )
    private = [record for record in records if record["epsilon"] is not None]
    assert private
    assert all(record["epsilon"][2] <= max(record["granted"]) for record in private)
    tried = {p["trials"] for name in ("fixed C=1", "FedAvg (no privacy)") for p in _picked(chosen, name)}
    tried |= {p["trials"] for p in chosen["starts"]["cold"]["methods"]["PAC-DP, Adam"].values()}
    assert tried == {PRESET.trials}
    text = report(tmp_path)
    assert "| hot | PAC-DP |" in text
    assert "| cold | PAC-DP, Adam |" in text
    assert "proxy only" in text
    assert "∞" in next(line for line in text.splitlines() if "FedAvg" in line)
    assert "| rounds to 5%, cold start | all the same | personalised |\n|---|---|---|\n| PAC-DP | 1 |" in text
    assert "| ε of everyone, cold start | PAC-DP |" in text
    assert "| clients in a round | everybody: same | 1 of 3, as many rounds: same |" in text
    assert text.count("not run") >= 4  # the other tasks, and every cell without public records
    drawn = draw_all(tmp_path, folders, tmp_path / "figures", said.append)
    assert [p.name.removeprefix("pac-dp-digits-") for p in drawn] == [
        "rounds.png",
        "cold.png",
        "adam.png",
        "budgets.png",
        "cold-budgets.png",
        "fit.png",
    ]
    assert all(p.stat().st_size > 5000 for p in drawn)


def _picked(chosen: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return list(chosen["starts"]["hot"]["methods"][name].values())


def test_without_public_records_a_rate_comes_from_other_images(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = scratch.Cell("toy-pixels", "digits", "pixels", "digits", rounds=2, seeds=1)
    network = scratch.Cell("toy-network", "digits", "cnn-small", lr=0.5, rounds=1, seeds=1, batch=16, steps=1)
    monkeypatch.setitem(TASKS, "digits", replace(TASK, same=50.0, personal={50.0: 0.5, 80.0: 0.5}))
    monkeypatch.setattr(scratch, "CELLS", {cell.name: cell for cell in (toy, network)})
    monkeypatch.setattr(scratch, "RATES", (0.001, 10.0))
    place = Workspace(folders)
    said: list[str] = []
    names = ["toy-pixels", "toy-network"]
    with runner(place, 1) as run:
        with pytest.raises(UserError, match="stage choose first"):
            play_scratch(names[:1], tmp_path, run, said.append)
        choose_scratch(names, tmp_path, place, said.append)
        chosen = json.loads((tmp_path / "scratch.json").read_text())
        assert list(chosen) == ["toy-pixels"]  # the other one's rate stands in the code
        assert chosen["toy-pixels"]["rows"]["AUTO-S"]["same"]["lr"] == 10.0
        play_scratch(names, tmp_path, run, said.append)
        records = json.loads((tmp_path / "results-scratch.json").read_text())
        assert len(records) == 8
        assert min(r["accuracy"] for r in records if r["cell"] == "toy-pixels") > 0.5
        monkeypatch.setattr(scratch.Runs, "accuracies", lambda *_: pytest.fail("known already"))
        play_scratch(names, tmp_path, run, said.append)


def test_a_cell_says_the_same_each_time(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "digits", TASK)
    cell = Cell("digits", DpSgd(lr=3.0), "discriminant-9", hot=True, rounds=2, case="same", seed=1)
    place = Workspace(folders)
    first, again = judged(place, cell), judged(place, cell)
    assert first == again
    other = judged(place, replace(cell, seed=2))
    assert other["accuracy"] != first["accuracy"] or other["loss"] != first["loss"]
    assert cells.tested(place, cell)["by_round"] == cells.tested(place, cell)["by_round"]
    assert "refused" in judged(place, replace(cell, method=DpSgd(clip=-1.0)))


def test_progress_is_told_cell_by_cell_and_shown_by_tenths(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = Cell("digits", DpSgd(), "discriminant-9", hot=True, rounds=2, case="same", seed=1)
    seen: list[tuple[int, int]] = []
    with runner(Workspace(folders), 1, lambda done, total: seen.append((done, total))) as run:
        assert list(run(lambda _, cell: {"seed": cell.seed}, [cell, replace(cell, seed=2)])) == [
            {"seed": 1},
            {"seed": 2},
        ]
    assert seen == [(1, 2), (2, 2)]
    with counting(quiet=False) as count:
        assert count is not None
        for done in range(1, 101):
            count(done, 100)
        assert capsys.readouterr().err.splitlines() == [f"cell={10 * k} cells=100" for k in range(1, 11)]
        for done in (1, 2):  # another list
            count(done, 2)
        assert capsys.readouterr().err.splitlines() == ["cell=1 cells=2", "cell=2 cells=2"]


def test_the_hot_start_knows_the_task_and_the_cold_one_nothing(folders: Folders) -> None:
    data = divided(TASK, folders)
    x, y = torch.from_numpy(data.test.scaled()), torch.from_numpy(data.test.y)
    hot, cold = (first_model(data, "discriminant-9", hot=hot)(x) for hot in (True, False))
    assert float((hot.argmax(1) == y).float().mean()) > 0.8
    assert torch.equal(cold, torch.zeros_like(cold))


def test_every_method_gets_as_many_trials() -> None:
    for preset in PRESETS.values():
        for row in methods.rows(TASK, preset.bounds):
            assert len(preset.rates(TASK, len(row.options))) * len(row.options) == preset.trials


def test_every_backbone_has_a_recipe(tmp_path: Path) -> None:
    fedcompdps = {"cifar-100-wide.npz"}
    assert {name for t in TASKS.values() for name in t.backbones} | fedcompdps == set(RECIPES)
    (tmp_path / "cifar-10.npz").write_bytes(b"there")
    ensure("cifar-10.npz", tmp_path, None, "cpu", None, pytest.fail)


def test_a_missing_backbone_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = BackboneShape(1, (8, 8), blocks=1, groups=4)
    recipe = Recipe("digits", shape, Pretraining(epochs=1, batch=600, held_out=10, projection=8))
    monkeypatch.setitem(RECIPES, "toy.npz", recipe)
    said: list[str] = []
    ensure("toy.npz", tmp_path / "new", None, "cpu", None, said.append)
    assert load_backbone(tmp_path / "new" / "toy.npz").about["proxy"] == "digits"
    assert "accuracies will be lower" in said[0]
    assert "training it on digits" in said[1]


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
        bench("quick", ["test"], tmp_path, tmp_path, tmp_path / "c", only=["heart-disease"])
    with pytest.raises(UserError, match="unknown task"):
        bench("quick", ["report"], tmp_path, tmp_path, tmp_path / "c", only=["mnits"])


def test_an_empty_folder_says_not_run(tmp_path: Path) -> None:
    assert "not run" in transfer(tmp_path)[-1]
    assert "| cifar-10-resnet18 | AUTO-S | not run | not run | 0.5 / 0.5 | fixed | 20 |" in report(tmp_path)
    assert {"mnist", "cifar-10-scattering"} <= set(not_run(tmp_path))


def test_hot_and_cold_starts_have_tables_of_their_own(tmp_path: Path) -> None:
    """Also runs of different lengths: what a shorter one has not done stays empty."""

    def made(start: str, row: str, case: str, by_round: list[float]) -> dict[str, Any]:
        about = {"task": "mnist", "start": start, "row": row, "case": case, "seed": 0, "first": 0.1, "bound": 0.5}
        return {**about, "accuracy": by_round[-1], "by_round": by_round, "epsilon": None}

    records = [
        made(start, row, case, [last / 2] * (rounds - 1) + [last])
        for start, rounds, last in (("hot", 2, 0.9), ("cold", 4, 0.6))
        for row, case in (("PAC-DP", "same"), ("sweep PAC-DP", "0.1"), ("search C=1", "0.1"))
    ]
    (tmp_path / "results-mnist.json").write_text(json.dumps(records))
    lines = report(tmp_path).splitlines()
    assert lines[lines.index("| accuracy by ε of everyone, hot start | 0.1 |") + 2] == "| PAC-DP | 90.0 |"
    assert lines[lines.index("| accuracy by ε of everyone, cold start | 0.1 |") + 2] == "| PAC-DP | 60.0 |"
    assert "| hot, same | 45.0 | 90.0 |  |  |" in lines
    assert "| cold, same | 30.0 | 30.0 | 30.0 | 60.0 |" in lines
    assert not any(line.startswith("| sweep") for line in lines)  # rounds to the target are of the main rows


def test_as_printed_is_played_in_both_divisions_and_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load("digits")
    monkeypatch.setattr(printed, "load", lambda name: whole)
    monkeypatch.setattr(printed, "CLIENTS", 10)
    monkeypatch.setattr(printed, "PER_ROUND", 1)
    monkeypatch.setattr(printed, "EVERY", 1)
    asked = ["--until", "1", "--out", str(tmp_path / "r"), "--only", "iid/as printed", "dirichlet:0.5/no privacy"]
    printed.main(asked)
    printed.main(asked)
    first, second = map(json.loads, (tmp_path / "r").read_text(encoding="utf-8").splitlines())
    assert (first["claimed"], second["true"], len(first["accuracy"])) == (1.0, None, 1)
    assert first["true"] > first["claimed"]
