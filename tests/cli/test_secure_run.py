"""`modicum run` behind secure aggregation: it runs, says what stands behind it, and refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.cli import run as command_line
from modicum.cli.app import app
from modicum.privacy.certificate import Certificate
from modicum.privacy.verify import verify

FILE = """\
[data]
name = "digits"
clients = {clients}

[privacy]
budgets = 4.0
{privacy}

[method]
name = "{method}"
view = "secure-aggregation"
{settings}

[run]
rounds = 1
{run}
"""


def write(tmp_path: Path, **changes: object) -> Path:
    given: dict[str, object] = {
        "clients": 5, "privacy": "", "method": "dp-sgd", "settings": "", "run": 'secure_aggregation = "protocol"',
    }  # fmt: skip
    path = tmp_path / "experiment.toml"
    path.write_text(FILE.format(**(given | changes)))
    return path


def test_a_run_by_the_protocol_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line(app, ["run", str(write(tmp_path, settings="dropouts = 1")), "--out", "r", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert "Secure aggregation: signed-survivors" in json.dumps(said)
    assert verify(tmp_path / "r").matches
    line = Certificate.read(tmp_path / "r" / "certificate.json").clients["client-00"]
    assert line.spec.view.to_dict()["variant"] == "signed-survivors"
    assert line.integers is not None
    assert line.integers["queries"]["gradient"]["honest"] == 5 - 1 - 1


REFUSED = [
    ({"settings": "dropouts = 3"}, "2t > P"),  # t = 2 of 5
    ({"settings": "colluding = 5"}, "neither colludes nor drops out"),
    ({"settings": "dropouts = 5"}, "neither colludes nor drops out"),
    ({"clients": 1}, "neither colludes nor drops out"),
    ({"settings": "batch = 16"}, "Poisson"),
    ({"settings": "steps = 3"}, "one step"),
    ({"clients": 1001}, "at most 1000 clients"),
    ({"privacy": 'noise = "float"'}, "masks need integers"),
    ({"run": 'secure_aggregation = "hopeful"'}, "secure_aggregation"),
    ({"method": "fedavg"}, "view"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_impossible_terms_are_one_line_and_exit_code_2(
    changes: dict[str, object],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = command_line(app, ["run", str(write(tmp_path, **changes)), "--out", "r"])
    err = capsys.readouterr().err
    assert code == 2
    assert why in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "r" / "ledger.sqlite").exists()  # nothing was reserved
