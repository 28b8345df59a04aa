"""`modicum verify` as typed: exit 0 on a match, 1 on a mismatch, 2 with one line on bad input."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from modicum.cli import main
from modicum.core.facts import ClientFacts
from modicum.errors import UserError
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import NoSampling
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import Journal
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
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
    assert "\nclaimed, not checked: " in out  # on a line of its own


@pytest.mark.parametrize("obeyed", [False, True], ids=["plain", "mutant"])
def test_a_terminal_obeys_no_name(
    obeyed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up and wiped: the line that says SIMULATION would be gone from the screen, and a match would stand there. Or
    the run's name is some lines long, the last of them a verdict."""
    if obeyed:
        monkeypatch.setattr("modicum.cli.verify.plain", lambda text: text)
    name, verdict = "ward\r\x1b[9A\x1b[2K\x1b[9B", "Match: the certificate follows from the ledger"
    with Ledger.create(tmp_path / "ledger.sqlite", f"run-1\n{verdict}", SimulatedNoise(0)) as ledger:
        ledger.declare(
            [PrivacyPlan(client=name, spec=PrivacySpec(unit="record"), budget=math.inf, guard=Guard.NONE)]
        )
    assert call(monkeypatch, "verify", str(tmp_path / "ledger.sqlite")) == 0
    out = capsys.readouterr().out
    assert "SIMULATION" in out
    assert ("\r" in out) is obeyed  # colours and the like are left out where nobody looks at a screen
    assert any(line.startswith(verdict) for line in out.splitlines()) is obeyed
    with pytest.raises(UserError, match="rename client"):
        ClientFacts(name, 10, 1.0, 1)


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


def test_what_is_claimed_comes_before_any_match(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "verify", str(run)) == 0
    before = capsys.readouterr().out.split("match")[0]
    for fact in (
        "unit       record",
        "adjacency  zero-out",
        "δ          1e-05",
        "adversary  the server and everyone",
    ):
        assert fact in before
    assert "for all 2 clients" in before
    assert "cryptographic generator" in before
    assert "SIMULATION" not in before
    assert "NO PRIVACY" not in before


def test_a_simulation_and_no_privacy_are_said_before_any_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, "run-1", SimulatedNoise(3)) as ledger:
        bare = PrivacyPlan(client="bare", spec=PrivacySpec(unit="record"), budget=math.inf, guard=Guard.NONE)
        hidden = PrivacyPlan(client="gdp", spec=PrivacySpec(unit="client"), budget=2.0, guard=Guard.GDP_FILTER)
        ledger.declare([bare, hidden])
    assert call(monkeypatch, "verify", str(path)) == 0
    before, after = capsys.readouterr().out.split("match", 1)
    assert "SIMULATION: noise and sampling coins are computed from seed 3" in before
    assert "NO PRIVACY is claimed for 1 of 2 clients: bare (ε = ∞)" in before
    assert "claimed    for 1 of 2 clients: gdp\nunit       client" in before
    assert after.startswith(" (no privacy)")
    assert call(monkeypatch, "verify", str(path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report).index("simulation") < list(report).index("match")
    assert (report["simulation"], [c["private"] for c in report["clients"]]) == (True, [False, True])


def test_a_head_that_was_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run / "ledger.sqlite")
    with Ledger.open(path) as ledger:
        early = ledger.head()
        ledger.declare([PrivacyPlan(client="c", spec=PrivacySpec(unit="record"), budget=1.0, guard="gdp-filter")])
        late = ledger.head()
    for head, code, words in (
        (late, 0, "is the last entry"),
        (early[:16], 0, "is entry 3; the ledger has gone on since, to 4"),
        ("0" * 64, 1, "is NOT in this ledger"),
        ("0" * 64, 1, "MISMATCH  the ledger was cut or rewritten"),
    ):
        assert call(monkeypatch, "verify", path, "--head", head) == code
        assert words in capsys.readouterr().out
    assert call(monkeypatch, "verify", path, "--head", early, "--json") == 0
    assert json.loads(capsys.readouterr().out)["kept_head"] == {"digits": early, "entry": 3}
    assert call(monkeypatch, "verify", path, "--head", "abc") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_second_plan_is_no_match(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forgery that only appends: ε = 2 would become 0.08."""
    with Journal.open(run / "ledger.sqlite") as journal:
        entries = list(journal.news())
        with journal.transaction(lambda _: None):
            journal.append("plan", {**entries[2].value, "budget": 0.08})
    assert call(monkeypatch, "verify", str(run)) == 1
    assert "entry 4: its key does not follow from its body" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["plan", "run"])
def test_a_run_that_somebody_appended_to_is_not_resumed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second plan would let all of it be spent again, a second run entry would change the noise source."""
    small = '[data]\nname = "digits"\nclients = 2\n[method]\nname = "aqc"\n[run]\nrounds = 1\n'
    (tmp_path / "small.toml").write_text(small)
    folder = tmp_path / "r"
    assert call(monkeypatch, "run", str(tmp_path / "small.toml"), "--out", str(folder), "--json") == 0
    with Journal.open(folder / "ledger.sqlite") as journal:
        entry = next(entry for entry in list(journal.news()) if entry.kind == kind)
        with journal.transaction(lambda _: None):
            forged = journal.append(kind, entry.value)
    capsys.readouterr()
    assert call(monkeypatch, "run", "--resume", str(folder)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"entry {forged.number}: " in err
    with Journal.open(folder / "ledger.sqlite", read_only=True) as journal:
        assert [e.hash for e in journal.news()][-1] == forged.hash  # nothing was spent


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
