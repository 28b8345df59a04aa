"""`modicum bench` finds the benchmarks of a clone, and says where they are when there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import modicum
from modicum.cli import bench, run
from modicum.cli.app import app

SOURCE = Path(modicum.__file__).parents[1]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONLY = """
import sys

EXTRAS = "typer click rich pydantic safetensors dp_accounting sklearn matplotlib flwr opacus".split()

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["speed", "--only", "nothing"]
from modicum_bench.speed import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["speed", "--only", "nothing"], "no row 'nothing' on cpu"),
        (["pac-dp", "--only", "nothing"], "unknown task 'nothing'"),
        (["acdp-pfsd", "--workers", "0"], "give at least one worker"),
        (["fedcompdp", "--stages", "nothing"], "unknown stage 'nothing'"),
        (["fedmap", "--workers", "0"], "the number of workers must be at least 1"),
        (["fedmap", "--seeds", "0"], "the number of seeds must be at least 1"),
    ],
)
def test_a_clone_has_the_benchmarks(
    arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command gets as far as the benchmark's own check of its arguments."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p) != BENCHMARKS])
    for name in [name for name in sys.modules if name.partition(".")[0] == "modicum_bench"]:
        monkeypatch.delitem(sys.modules, name)
    assert run(app, ["bench", *arguments]) == 2
    assert answer in capsys.readouterr().err


def test_an_installed_package_says_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path / "benchmarks")
    assert run(app, ["bench", "speed"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("modicum: the benchmarks are in the source repository: clone it")


def test_speed_needs_torch_numpy_and_scipy_alone() -> None:
    path = {"PYTHONPATH": f"{SOURCE}:{BENCHMARKS}"}
    found = subprocess.run([sys.executable, "-c", ONLY], env=path, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "no row 'nothing' on cpu" in found.stderr


@pytest.mark.parametrize("name", ["speed", "pac-dp", "leaderboard", "acdp-pfsd", "attacks", "fedcompdp", "fedmap"])
def test_a_folder_that_is_a_file_is_said_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        assert run(app, ["bench", name, "--out", str(tmp_path / out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"modicum: cannot write to {tmp_path / out}: choose another folder"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["attacks", "--only", "nothing"], "unknown task 'nothing'"),
        (["attacks", "--seconds", "nan"], "--seconds must be positive, got nan"),
        (["acdp-pfsd", "--seconds", "-1"], "--seconds must be positive, got -1"),
        (["fedmap", "--backbone", "nowhere"], "'nowhere' does not exist"),
        (["leaderboard", "--workers", "0"], "the number of workers must be at least 1"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert answer in line
