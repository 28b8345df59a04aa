"""The default method decides for itself, from public facts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import modicum as mo
from modicum.cli import run as command_line
from modicum.cli.app import app
from modicum.config import read
from modicum.federation.experiment import Experiment
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.setup import decided
from modicum.methods import Auto


def digits(budget: float, proxy: float | bool = False) -> mo.Federation:
    return mo.Federation.from_dataset("digits", clients=10, budgets=budget, proxy=proxy, seed=0)


def played(federation: mo.Federation, rounds: int = 15) -> Rehearsal:
    run = Rehearsal(Experiment(federation=federation, method=Auto(), rounds=rounds, seed=0))
    list(run.rounds())
    return run


def accuracy(run: Rehearsal, theta: torch.Tensor) -> float:
    logits = run.backend.outputs(theta, run.data.test.x)
    return float((logits.argmax(1) == run.data.test.targets["y"]).float().mean())


def test_it_learns_without_anything_being_set() -> None:
    run = played(digits(8.0))
    assert accuracy(run, run.server.full_model(run.data.first)) > 0.8


def test_a_public_start_is_a_fitted_head_and_tiny_budgets_hardly_leave_it() -> None:
    run = played(digits(0.01, proxy=0.3))
    first, last = run.data.first, run.server.full_model(run.data.first)
    assert accuracy(run, first) > 0.85
    assert accuracy(run, last) > accuracy(run, first) - 0.02
    said = " ".join(decided(run.method, run.kit))
    assert "logistic head on public records" in said


def test_the_average_of_the_rounds_is_reported() -> None:
    run = played(digits(8.0), rounds=3)
    assert run.server.state.average is not None
    assert not np.allclose(run.server.reported, run.server.state.model)


def test_it_is_what_a_file_without_a_method_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text('[data]\nname = "digits"\nclients = 4\n\n[run]\nrounds = 2\n', encoding="utf-8")
    assert read(path).method == Auto()
    assert command_line(app, ["run", str(path), "--explain"]) == 0
    out = capsys.readouterr().out
    assert "2 whole-batch steps" in out
    assert "cut to length 1 as they are" in out
    assert "Only the head is trained" in out
    assert command_line(app, ["run", str(path), "--explain", "--json"]) == 0
    assert "2 whole-batch steps" in json.loads(capsys.readouterr().out)[0]
    assert list(tmp_path.iterdir()) == [path]
