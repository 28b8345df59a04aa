"""`modicum fit-clipping` from a file to a curve, its picture and a run that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.papers.pac_dp.curve import read_curve

FILE = """
[data]
name = "digits"
clients = 2
proxy = 0.2

[method]
name = "pac-dp"
lr = 2.0

[run]
rounds = 2
hot_start = 2

[fit]
budgets = [0.5, 8.0]
bounds = [0.1, 1.0]
seeds = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "fit.toml").write_text(FILE)
    return tmp_path / "fit.toml"


def test_from_file_to_run(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["fit-clipping", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    curve = read_curve(facts["curve"])
    assert curve.inputs[0] == 0.5
    assert curve.inputs[-1] == 8.0
    assert Path(facts["picture"]).read_bytes().startswith(b"\x89PNG")
    assert len(list(file.with_suffix(".curve.cells").glob("*.json"))) == 4
    use = FILE.split("[fit]")[0].replace("lr = 2.0", f"lr = 2.0\ncurve = {json.dumps(facts['curve'])}")
    (tmp_path / "use.toml").write_text(use)
    assert run(app, ["run", str(tmp_path / "use.toml"), "--out", str(tmp_path / "run"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["rounds"] == 2


def test_a_second_call_computes_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["fit-clipping", str(file)]) == 0
    assert "warning  at ε=0.5, 8 the best bound is the smallest or largest" in capsys.readouterr().out  # of two
    first = file.with_suffix(".curve.json").read_text()
    cells = {p: p.stat().st_mtime_ns for p in file.with_suffix(".curve.cells").iterdir()}
    assert run(app, ["fit-clipping", str(file)]) == 0
    assert file.with_suffix(".curve.json").read_text() == first
    assert {p: p.stat().st_mtime_ns for p in file.with_suffix(".curve.cells").iterdir()} == cells
    assert "a constant: C = 1 whatever the budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("[fit]", "[other]", "fit"),
        ("seeds = 1", "seed = 1", "fit.seed"),
        ("bounds = [0.1, 1.0]", "bounds = [1.0, 0.1]", "rise"),
        ("bounds = [0.1, 1.0]", "bounds = 3", "lists of numbers"),
        ("budgets = [0.5, 8.0]", "", "fit.budgets"),
        ("proxy = 0.2", "", "public records"),
    ],
)
def test_bad_files_end_in_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, word: str
) -> None:
    file.write_text(FILE.replace(old, new))
    assert run(app, ["fit-clipping", str(file)]) == 2
    said = capsys.readouterr().err
    assert word in said
    assert said.count("\n") == 1
