"""`modicum verify` as typed: exit 0 on a match, 1 on a mismatch, 2 with one line on bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from modicum.cli import main
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import NoSampling
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = PrivacySpec(unit="record")
    planned = PlannedRelease("update", 20.0, NoSampling(), 10)
    with Ledger.create(tmp_path / "ledger.sqlite", "run-1", CryptoNoise()) as ledger:
        ledger.declare(
            [
                PrivacyPlan(client="planned", spec=spec, budget=1.0, releases=(planned,)),
                PrivacyPlan(client="gdp", spec=spec, budget=2.0, guard=Guard.GDP_FILTER),
            ]
        )
        Certificate.from_ledger(ledger).write(tmp_path / "certificate.json")
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["modicum", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_match(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "verify", str(run)) == 0
    out = capsys.readouterr().out
    assert "Match: the certificate follows from the ledger for all 2 clients." in out
    assert "MISMATCH" not in out


def test_mismatch(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "certificate.json"
    value = json.loads(path.read_text())
    value["clients"]["gdp"]["epsilon"] = 0.1
    path.write_text(json.dumps(value))
    assert call(monkeypatch, "verify", str(run)) == 1
    assert "certified ε=0.1" in capsys.readouterr().out
    assert call(monkeypatch, "verify", str(run), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["match"] is False
    assert [c["client"] for c in report["clients"] if not c["match"]] == ["gdp"]


def test_json(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "verify", str(run / "ledger.sqlite"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["match"] is True
    assert report["certificate"] is False
    assert len(report["clients"]) == 2


@pytest.mark.parametrize("name", ["nothing", "certificate.json", "broken.sqlite", "."])
def test_bad_input(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "broken.sqlite").write_bytes((run / "ledger.sqlite").read_bytes()[:5000])
    if name == ".":
        (run / "certificate.json").unlink()
    assert call(monkeypatch, "verify", str(run / name)) == 2
    error = capsys.readouterr().err
    assert error.startswith("modicum: ")
    assert error.count("\n") == 1
