"""`modicum fit-metanet`: a network, a picture and a gain; and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.cli.fit_metanet import _facts, _text
from modicum.cli.target import refuse_unwritable
from modicum.papers.fedmap.fit import Fitted
from modicum.papers.fedmap.network import Network

EXAMPLE = Path(__file__).parents[2] / "examples" / "fedmap-digits.toml"
SMALL = ["run.rounds=4", "metanet.runs=1", "metanet.held_out=2", "metanet.passes=1", "metanet.epochs=2"]


def call(*arguments: str) -> int:
    return run(app, ["fit-metanet", *arguments])


def test_the_example_becomes_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small.metanet.npz"
    settings = [part for option in SMALL for part in ("--set", option)]
    assert call(str(EXAMPLE), *settings, "--out", str(out), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert out.exists()
    assert len(facts["gains"]) == 2
    assert len(facts["decisions"]) == 4
    assert facts["picture"] is None or Path(facts["picture"]).exists()


def test_a_network_is_recommended_where_its_gain_is_clear() -> None:
    def said(*gains: float) -> str:
        return _text(_facts(Fitted({}, Network(3), gains, (), ()), Path("n.npz"), None))

    assert 'network = "n.npz"' in said(0.03, 0.02, 0.025)
    for unclear in ((-0.07, -0.08, -0.06), (0.03, -0.02, 0.0), (0.05,)):
        assert 'clipping = "auto", kinds = []' in said(*unclear)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("metanet.runs=0", "at least one run"),
        ("metanet.epoch=3", "did you mean 'epochs'"),
        ("data.proxy=false", "no public traces"),
        ("method.kinds=[1.0, 1.0]", "must differ"),
        ('metanet.backbone="nowhere"', "no config.json"),
        ('method.clipping="fixed"', "only fedmap has a network"),
    ],
)
def test_bad_input_is_one_line(option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(EXAMPLE), "--set", option, "--out", str(tmp_path / "n.npz")) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
    assert not (tmp_path / "n.npz").exists()


def test_a_file_that_cannot_be_written_is_said_before_hours_of_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("simulations began")

    monkeypatch.setattr("modicum.papers.fedmap.fit.fit_metanet", begun)
    assert call(str(EXAMPLE), "--out", str(tmp_path / "nowhere" / "n.npz")) == 2
    assert "cannot write" in capsys.readouterr().err
    kept = tmp_path / "n.npz"
    kept.write_bytes(b"an earlier network")
    refuse_unwritable(kept)
    refuse_unwritable(tmp_path / "new.npz")
    assert kept.read_bytes() == b"an earlier network"
    assert not (tmp_path / "new.npz").exists()
