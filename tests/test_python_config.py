"""The config.toml of a run from Python: refused for its data alone; all else is as files write it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from modicum.cli import run as command
from modicum.cli.app import app
from modicum.config.read import check
from modicum.config.source import parse
from modicum.config.write import describe_experiment
from modicum.core.facts import Metric
from modicum.errors import UserError
from modicum.methods import METHODS, Composed, DpSgd
from tests.rows import experiment

RUNNABLE = '[data]\nname = "digits"\nclients = 4\n'


@pytest.mark.parametrize("name", METHODS)
def test_what_python_writes_is_refused_for_its_data_alone(name: str) -> None:
    """With data that a file can name, everything else reads back as it was."""
    made = experiment(METHODS[name](), rounds=3, metrics=(Metric("accuracy", 2, 30.0),), bounds=(0.1, 10.0))
    text = describe_experiment(made, simulation=True)
    with pytest.raises(UserError, match=r"^run, line 3: the data of this run came from Python"):
        check(parse(text, "run"))
    config = check(parse(re.sub(r"\[data\].*?\n\n", RUNNABLE + "\n", text, flags=re.S), "run"))
    assert config.method == made.method
    assert (config.run.rounds, config.run.bounds, config.run.metrics[0].every) == (3, (0.1, 10.0), 2)


@pytest.mark.parametrize("own", [{"model": nn.Linear(5, 3)}, {"method": Composed()}], ids=["model", "method"])
def test_a_model_or_method_of_ones_own_is_refused_for_the_same_reason(
    own: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = experiment(**{"method": DpSgd(), **own})  # type: ignore[arg-type]
    (tmp_path / "config.toml").write_text(describe_experiment(made, simulation=True))
    for words in (["run", "config.toml"], ["run", "--resume", "."], ["compare", "config.toml"]):
        place = [str(tmp_path / word) if word in (".", "config.toml") else word for word in words]
        assert command(app, place) == 2
        said = capsys.readouterr().err
        assert "came from Python" in said
        assert said.count("\n") == 1
