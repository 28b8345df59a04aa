"""`modicum fit-agent`: an agent that a run begins with, what it wins, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.cli.fit_agent import _facts, _text
from modicum.papers.acdp_pfsd.pretrain import Lesson

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "digits.toml")
SMALL = ['method.name="acdp-pfsd"', "method.memory=2", "method.sample=2", "data.proxy=0.2", "run.rounds=3"]


def call(verb: str, *settings: str, more: tuple[str, ...] = ()) -> int:
    return run(app, [verb, EXAMPLE, *(word for s in (*SMALL, *settings) for word in ("--set", s)), *more])


def test_an_agent_is_taught_and_a_run_begins_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    assert call("fit-agent", more=("--episodes", "2", "--held-out", "2", "--out", str(out), "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (len(facts["accuracies"]), len(facts["gains"])) == (2, 2)
    assert call("run", f"method.agent={json.dumps(str(out))}", more=("--out", str(tmp_path / "run"))) == 0


def test_an_agent_is_recommended_where_its_gain_is_clear() -> None:
    def said(*gains: float) -> str:
        return _text(_facts(Lesson((0.5,), gains), Path("a.json")))

    assert 'agent = "a.json"' in said(0.03, 0.02, 0.025)
    for unclear in ((-0.07, -0.08, -0.06), (0.03, -0.02, 0.0), (0.05,)):
        assert 'clipping = "fixed"' in said(*unclear)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ('method.clipping="fixed"', "only an agent is taught"),
        ("data.proxy=false", "give the federation a proxy"),
    ],
)
def test_bad_input_is_one_line(option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("fit-agent", option, more=("--out", str(tmp_path / "a.json"))) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
    assert not (tmp_path / "a.json").exists()
