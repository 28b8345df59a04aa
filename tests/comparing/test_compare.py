"""Comparisons: cells, workers, what is paired with what, and going on after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import modicum as mo
from modicum.cli import run as command
from modicum.cli.app import app
from modicum.comparing import cells_of, compare, play, resume
from modicum.comparing.comparison import Comparison, half_width
from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.report.track import MAKERS
from modicum.studio.catalogue import Catalogue
from modicum.studio.compared import compare as side_by_side
from tests.test_track import Notes

TEXT = """
[data]
name = "digits"
clients = 4
[privacy]
budgets = 8.0
[method]
name = "dp-sgd"
lr = 2.0
[run]
rounds = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TEXT)
    return path


def test_a_named_method_keeps_the_files_own_settings_and_others_have_their_defaults(file: Path) -> None:
    cells = cells_of([file], methods=["dp-sgd", "aqc"], seeds=range(2))
    assert [(c.variant, c.seed) for c in cells] == [("dp-sgd", 0), ("dp-sgd", 1), ("aqc", 0), ("aqc", 1)]
    assert "lr = 2.0" in cells[0].config
    assert "lr = 2.0" not in cells[2].config


def test_an_option_for_one_method_leaves_the_others_alone(file: Path) -> None:
    first, second = cells_of([file], methods=["dp-sgd", "aqc"], options=["aqc:method.lr=7.0"])
    assert "lr = 7.0" in second.config
    assert "lr = 7.0" not in first.config


def test_a_grid_multiplies_and_names_its_points(file: Path) -> None:
    cells = cells_of([file], grid=["privacy.budgets=[0.5, [1, 8]]", "run.rounds=1,2"])
    assert [c.label for c in cells] == [
        "dp-sgd budgets=0.5 rounds=1",
        "dp-sgd budgets=0.5 rounds=2",
        "dp-sgd budgets=[1, 8] rounds=1",
        "dp-sgd budgets=[1, 8] rounds=2",
    ]
    assert len({c.folder for c in cells}) == 4


def test_results_do_not_depend_on_the_workers_and_a_stopped_comparison_goes_on(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, list[object]]] = []

    class Noted(Notes):
        def __init__(self, folder: str) -> None:
            super().__init__()
            heard.append((folder, self.lines))

    monkeypatch.setitem(MAKERS, "tensorboard", Noted)
    one = compare(file, methods=["dp-sgd", "fedavg"], seeds=1, folder=tmp_path / "one", track=["tensorboard:logs"])
    first, *runs = heard  # made beforehand, to see that it can be
    assert first == ("logs", [])
    assert [lines[0][0] for _, lines in runs] == ["one/dp-sgd-seed0", "one/fedavg-seed0"]  # type: ignore[index]
    assert all(lines[1][0] == 1 and lines[-1] == "end" for _, lines in runs)  # type: ignore[index]
    two = compare(file, methods=["dp-sgd", "fedavg"], seeds=1, folder=tmp_path / "two", workers=2)
    assert one.to_csv() == two.to_csv()
    cut = RunFolder(tmp_path / "two" / "fedavg-seed0")
    kept = (tmp_path / "two" / "dp-sgd-seed0" / "report.html").stat().st_mtime_ns
    cut.report.unlink()
    seen: list[tuple[int, int]] = []
    again = resume(tmp_path / "two", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 2)]
    assert cut.report.exists()
    assert (tmp_path / "two" / "dp-sgd-seed0" / "report.html").stat().st_mtime_ns == kept
    assert again.to_csv() == one.to_csv()
    assert mo.compare is compare
    assert one.to_dict()["lines"][1]["epsilon"] is None  # FedAvg protects nothing


def row(variant: str, seed: int, accuracy: float, budget: float = 1.0) -> dict[str, object]:
    return {
        "label": f"{variant} {budget}",
        "variant": variant,
        "point": {"privacy.budgets": budget},
        "seed": seed,
        "main": "accuracy",
        "score": accuracy,
        "accuracy": accuracy,
        "loss": None,
        "macro_f1": accuracy / 2,
        "epsilon": budget,
        "simulation": True,
    }


def test_differences_are_paired_by_seed_at_the_same_place_in_the_grid() -> None:
    rows = [
        *(row("a", seed, value) for seed, value in enumerate((0.1, 0.5, 0.9))),
        *(row("b", seed, value) for seed, value in enumerate((0.2, 0.6, 1.0))),
        row("a", 0, 0.3, 8.0),
        row("b", 0, 0.7, 8.0),
    ]
    lines = {line.label: line for line in Comparison(Path(), tuple(rows)).lines()}
    assert lines["b 1.0"].difference == pytest.approx(0.1)
    assert lines["b 1.0"].interval == pytest.approx(0, abs=1e-12)  # although single runs differ by far more
    assert lines["b 1.0"].spread == pytest.approx(0.4)
    assert lines["b 1.0"].macro_f1 == pytest.approx(0.3)
    assert lines["b 8.0"].difference == pytest.approx(0.4)
    assert lines["b 8.0"].interval is None
    assert lines["a 8.0"].difference is None


DOSES = """
[data]
csv = "{table}"
client_column = "site"
label_column = "dose"
test = 0.3
[privacy]
budgets = 8.0
[task]
name = "regression"
[method]
name = "dp-sgd"
lr = 0.1
[run]
rounds = 2
"""


def test_another_task_is_compared_by_its_own_metric(tmp_path: Path) -> None:
    table = tmp_path / "doses.csv"
    lines = [f"{'ab'[i % 2]},{i / 60:.3f},{(i * 7 % 60) / 60:.3f},{i / 90:.3f}" for i in range(60)]
    table.write_text("\n".join(["site,age,weight,dose", *lines]))
    (tmp_path / "doses.toml").write_text(DOSES.format(table=table))
    found = compare(tmp_path / "doses.toml", grid={"method.lr": [0.1, 0.5]}, seeds=2, folder=tmp_path / "two")
    assert found.main == "r2"
    assert found.table().splitlines()[0].split()[:2] == ["R²*", "loss*"]
    assert "%" not in found.table().replace("95% intervals", "")
    by_run = mo.load(tmp_path / "two" / str(found.rows[0]["folder"]))
    assert found.values(found.labels[0])[0] == pytest.approx(by_run.metrics["r2"])
    page = (tmp_path / "two" / "report.html").read_text()
    assert "R²*" in page
    assert "<th>accuracy" not in page
    chosen = Catalogue(tmp_path / "two")
    ids = [one["id"] for one in chosen.look()]
    told = side_by_side(chosen, ids)
    assert told["main"] == "r2"
    assert {line["main"] for line in told["lines"]} == {"r2"}


def test_the_interval_is_students() -> None:
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give an experiment file"),
        (["{file}", "--seeds", "0"], "at least 1 seed"),
        (["{file}", "--methods", "nonsense"], "--methods: unknown method"),
        (["{file}", "--methods", "aqc,aqc"], "twice"),
        (["{file}", "--workers", "0"], "workers must be at least 1"),
        (["{file}", "--grid", "budgets"], "--grid table.key=value"),
        (["{file}", "--set", "aqc:method.lr=1"], "not compared here"),
        (["{file}", "--set", "method.nonsense=1"], "nonsense"),
        (["{file}", "--json", "--csv"], "give one of them"),
        (["{file}", "--against", "aqc"], "'aqc' is not compared here"),
        (["{file}", "--track", "wandb"], "cannot log to 'wandb'"),
        (["{file}", "--resume", "x"], "--resume goes on"),
        (["--resume", "x"], "no comparison in x"),
        (["nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command(app, ["compare", *(a.format(file=file) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("runs/*/*/ledger.sqlite"))


def test_a_folder_of_another_comparison_is_refused(file: Path, tmp_path: Path) -> None:
    compare(file, seeds=1, folder=tmp_path / "out")
    with pytest.raises(UserError, match="holds another comparison"):
        compare(file, seeds=1, options=["run.rounds=2"], folder=tmp_path / "out")
    cell = RunFolder(tmp_path / "out" / "dp-sgd-seed0")
    written = cell.config.read_text()
    cell.config.write_text(written.replace("rounds = 1", "rounds = 7"))  # a run that was put there
    with pytest.raises(
        UserError, match=r"holds another experiment: run.rounds is 7 there and 1 in this comparison"
    ):
        resume(tmp_path / "out")
    cell.config.unlink()
    with pytest.raises(UserError, match=r"lost its config\.toml"):
        resume(tmp_path / "out")
    cell.config.write_text(written)
    plan = json.loads((tmp_path / "out" / "compare.json").read_text())
    (tmp_path / "out" / "compare.json").write_text(json.dumps({**plan, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        resume(tmp_path / "out")


CELL = {"variant": "dp-sgd", "seed": 0, "config": TEXT, "point": {}}


@pytest.mark.parametrize(
    "cells",
    [
        None,
        5,
        [],
        {"a": 1},
        ["a"],
        [{}],
        [{**CELL, "more": 1}],
        [{**CELL, "variant": 3}],
        [{**CELL, "seed": "0"}],
        [{**CELL, "config": ["x"]}],
        [{**CELL, "point": [1]}],
    ],
    ids=repr,
)
def test_a_damaged_plan_is_one_line(cells: object, tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text(json.dumps({"format": 1, "cells": cells}))
    with pytest.raises(UserError, match=r"compare\.json is damaged"):
        resume(tmp_path)


def test_cells_are_audited_where_the_file_says_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def note(*_: object, audit: str | None, **__: object) -> None:
        asked.append(audit)
        raise UserError("seen")

    monkeypatch.setattr(play, "carry_out", note)
    for audit in ("one-run", "canife"):
        with pytest.raises(UserError, match="seen"):
            compare(file, seeds=1, options=[f"run.audit={audit}"], folder=tmp_path / audit)
    assert asked == ["one-run", "canife"]


def test_every_cell_draws_on_the_files_account(file: Path, tmp_path: Path) -> None:
    """A grant of one cell and a half pays for one; seeds are further runs on the same records."""
    account = f'[account]\nbudget = 12.0\nfolder = "{tmp_path / "account"}"\n'
    file.write_text(TEXT + account)
    with pytest.raises(UserError, match="lifetime grant"):
        compare(file, seeds=2, folder=tmp_path / "out")
    with DatasetAccount.open(tmp_path / "account", read_only=True) as kept:
        assert len(kept.draws) == 1
    with pytest.raises(UserError, match="stays on this machine"):
        compare(file, seeds=1, ray="local", folder=tmp_path / "away")
