"""Following a started run from its folder: rounds, results, what went wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.deploy.flower import gate, keys, link, server_app
from modicum.deploy.flower.follow import STARTED, Started, follow, forget_earlier, note_start, round_age, status_of
from modicum.deploy.flower.project import LOG_FILE, STATUS, settings, write_project
from modicum.errors import UserError
from modicum.federation.records import MetricsFile, RoundRecord
from modicum.federation.run_folder import RunFolder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "server"
    folder.mkdir()
    return write_project(
        tmp_path / "app",
        settings(tmp_path / "experiment.toml", folder, tmp_path / "silos.toml", tmp_path / "server.sign"),
    )


def record(round: int) -> RoundRecord:
    return RoundRecord(round, {"a": 1.0}, 2, {}, False, 0.5)


def say(folder: Path, state: str, said: str = "") -> None:
    (folder / STATUS).write_text(json.dumps({"state": state, "said": said, "pid": 1}))


def test_rounds_are_told_as_they_come_and_the_end_is_returned(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.append(record(0))  # of an earlier start: not told again
    say(tmp_path, "running")

    def server() -> None:
        for i in (1, 2):
            file.append(record(i))
            time.sleep(0.05)
        say(tmp_path, "failed", "two silos are gone")

    seen: list[int] = []
    thread = threading.Timer(0.1, server)
    with RunFolder(tmp_path).alone():  # as a live server holds it
        thread.start()
        known = follow(tmp_path, lambda r: seen.append(r.round), poll=0.01)
        thread.join()
    assert seen == [1, 2]
    assert (known["state"], known["said"]) == ("failed", "two silos are gone")


def test_a_killed_server_is_not_running(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that says "running", holds the folder and is killed: `status` and a foreground `start` see it."""
    folder = project.parent / "server"
    code = "import sys, time; from pathlib import Path; from modicum.federation.run_folder import RunFolder\n"
    code += "with RunFolder(Path(sys.argv[1])).alone(): print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        say(folder, "running", "waiting for ward-b (its node is not connected)")
        assert run(app, ["flower", "status", str(project)]) == 0
        assert "running: waiting for ward-b (its node is not connected)" in capsys.readouterr().out
        threading.Timer(0.3, server.kill).start()
        began = time.monotonic()
        assert follow(folder, lambda _: None, poll=0.05)["state"] == "died"
        assert time.monotonic() - began < 30
    assert run(app, ["flower", "status", str(project)]) == 0
    assert "died: the server's process is gone" in capsys.readouterr().out
    monkeypatch.setattr(RunFolder, "held", lambda _: True)  # without that look it seems alive
    assert status_of(folder)["state"] == "running"


def test_who_did_not_answer_is_named() -> None:
    parties = {"ward-a": {"bytes_up": 1.0, "seconds": 2.0}, "ward-b": {"bytes_up": 0.0}}
    assert server_app.without(replace(record(0), parties=parties)) == "; no answer from ward-b"
    assert server_app.without(record(0)) == ""


def test_a_server_that_does_not_begin_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has not begun after 0 s"):
        follow(tmp_path, lambda _: None, poll=0.01, begin=0.0)


def test_a_new_start_forgets_what_an_earlier_server_said(tmp_path: Path) -> None:
    say(tmp_path, "failed", "of old")
    forget_earlier(tmp_path)
    assert status_of(tmp_path)["state"] == "waiting"
    say(tmp_path, "finished")  # by a server that was quicker than whoever started it
    note_start(tmp_path, Started(7, "127.0.0.1:1", "keys"))
    assert status_of(tmp_path)["state"] == "finished"


def test_a_second_start_hides_no_run_that_goes_on(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It made `status` say `waiting` over a run at work, and `stop` end the run that was not."""
    folder = project.parent / "server"
    note_start(folder, Started(7, "127.0.0.1:1", "keys"))
    say(folder, "running")
    with RunFolder(folder).alone():
        assert run(app, ["flower", "start", str(project)]) == 2
        assert "a run goes on in" in capsys.readouterr().err
        assert status_of(folder)["state"] == "running"
        assert '"run_id": 7' in (folder / STARTED).read_text()
    forget_earlier(folder)  # the negative control: nobody holds the folder, so its server is gone
    assert status_of(folder)["state"] == "waiting"


def test_status_and_logs_tell_why_a_run_died(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real server, which finds no keys of silos: the run's folder says so, without anybody watching."""
    folder = project.parent / "server"
    with pytest.raises(UserError):
        server_app.run(
            None, {k: str(v) for k, v in settings(project, folder, project / "none.toml", project).items()}
        )
    assert run(app, ["flower", "status", str(project)]) == 0
    assert "failed: cannot read" in capsys.readouterr().out
    assert run(app, ["flower", "logs", str(project), "--lines", "1"]) == 0
    assert "cannot read" in capsys.readouterr().out
    assert run(app, ["flower", "status", str(project), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "failed"


def test_a_server_that_breaks_leaves_its_reason(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project.parent / "server"
    monkeypatch.setattr("modicum.deploy.flower.register.read_public_keys", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        server_app.run(None, {k: str(v) for k, v in settings(project, folder, project, project).items()})
    assert status_of(folder)["state"] == "failed"
    assert "ZeroDivisionError" in status_of(folder)["said"]
    assert "ZeroDivisionError" in (folder / LOG_FILE).read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "nowhere"], "there is no project in nowhere"),
        (["logs", "nowhere"], "there is no project in nowhere"),
        (["stop", "nowhere"], "there is no project in nowhere"),
        (["logs", "{project}", "--lines", "0"], "--lines must be at least 1"),
        (["logs", "{project}"], "the run has not begun"),
        (["stop", "{project}"], "no run was started"),
        (["status", "{other}"], "is not a project of"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert run(app, ["flower", *(a.format(project=project, other=tmp_path) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_round_that_is_long_ago_is_told(tmp_path: Path) -> None:
    """A server that hangs has a process and says `running`: the age of its last round tells."""
    assert round_age(tmp_path) is None
    metrics = RunFolder(tmp_path).metrics
    metrics.write_text("")
    then = time.time() - 90
    os.utime(metrics, (then, then))
    assert 89 < (round_age(tmp_path) or 0) < 120


def test_who_waits_for_no_number_of_seconds_is_told_at_once(tmp_path: Path) -> None:
    """`--wait nan` once waited for ever."""
    keys.make_tls(tmp_path)
    gate.make_token(tmp_path)
    for seconds in (float("nan"), -1.0):
        with pytest.raises(UserError, match="no SuperLink answers"):
            link.wait_for("127.0.0.1:1", tmp_path, seconds)
