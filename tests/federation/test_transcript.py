"""A transcript on disk: the same things in the same order as in memory, each once, whatever stopped the run."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import modicum as mo
from modicum.core.messages import Broadcast, Noised, decode
from modicum.core.setting import MethodSpec
from modicum.errors import UserError
from modicum.federation import checkpoints, transcript_file
from modicum.federation.in_process import InProcess
from modicum.federation.server import Server, TrustedLedger
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import AGGREGATOR, Remember, Seen
from modicum.federation.transcript_file import FileTranscript, load_transcript
from modicum.methods import AcdpPfsd, DpFedAvg, DpSgd
from modicum.privacy.noise import SimulatedNoise
from tests.deploy.flower.helpers import CLIENT_LEVEL, RECORD_LEVEL
from tests.deploy.flower.test_coordinator import Direct, coordinator, finish, silos
from tests.rows import experiment, federation

SPECS: dict[str, MethodSpec] = {
    "record": DpSgd(batch=4),
    "secure-aggregation": DpFedAvg(batch=4),
    "trusted-secret": DpFedAvg(batch=4, view="trusted-server", rate=0.5),
    "personal": AcdpPfsd(batch=4, memory=2, passes=2, sample=2, view="server-sees-messages"),
}
EQUAL = (4.0,) * 4


def run(spec: MethodSpec, folder: Path) -> Simulation:
    made = experiment(spec, federation=federation(budgets=EQUAL))
    folder.mkdir(exist_ok=True)
    seen = FileTranscript(folder / "transcript.bin")
    return Simulation(made, folder, noise=SimulatedNoise(0), transcript=seen)


def stop(sim: Simulation) -> None:
    sim.close()
    assert isinstance(sim.carrier.transcript, FileTranscript)
    sim.carrier.transcript.close()


def whole(spec: MethodSpec, folder: Path) -> bytes:
    sim = run(spec, folder)
    list(sim.rounds())
    stop(sim)
    return (folder / "transcript.bin").read_bytes()


@pytest.mark.parametrize("name", SPECS)
def test_is_what_memory_would_have_kept(name: str, tmp_path: Path) -> None:
    whole(SPECS[name], tmp_path / "file")
    found = load_transcript(tmp_path / "file")
    kept = Remember()
    made = experiment(SPECS[name], federation=federation(budgets=EQUAL))
    sim = Simulation(made, tmp_path / "memory", noise=SimulatedNoise(0), transcript=kept)
    list(sim.rounds())
    sim.close()
    assert [(s.party, s.round, s.kind, s.sender) for s in found.seen] == [
        (s.party, s.round, s.kind, s.sender) for s in kept.seen
    ]
    assert [s.content for s in found.seen] == [s.content for s in kept.seen]
    assert (tmp_path / "file" / "transcript.bin").stat().st_mode & 0o777 == stat.S_IRUSR | stat.S_IWUSR


def test_shares_are_the_aggregators(tmp_path: Path) -> None:
    whole(SPECS["secure-aggregation"], tmp_path / "a")
    found = load_transcript(tmp_path / "a" / "transcript.bin")
    assert {s.party for s in found.of("message")} == {AGGREGATOR}
    assert {s.party for s in found.of("opened")} == {"(server)"}
    assert isinstance(decode(found.of("broadcast")[0].content), Broadcast)


class Stopped(Exception):  # noqa: N818
    pass


def before(owner: Any, name: str, round: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Stops the process, so to speak, when this is called in that round."""

    def put(monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = getattr(owner, name), [0]

        def raising(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == round + 1:
                raise Stopped
            return real(*given, **named)

        monkeypatch.setattr(owner, name, raising)

    return put


STOPS = {
    "between asking and opening": before(InProcess, "open", 1),
    "before the new model": before(Server, "combine", 1),
    "before the checkpoint": before(checkpoints, "save_state", 1),
    "before a sum is settled": before(TrustedLedger, "settle", 1),
}


ONLY_TRUSTED = "before a sum is settled"
CRASHES = [(n, where) for n in SPECS for where in STOPS if where != ONLY_TRUSTED or n.startswith("trusted")]


@pytest.mark.parametrize(("name", "where"), CRASHES)
def test_a_resumed_run_writes_the_same_bytes(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(SPECS[name], tmp_path / "whole")
    sim = run(SPECS[name], tmp_path / "stopped")
    with monkeypatch.context() as only_here:
        STOPS[where](only_here)
        with pytest.raises(Stopped):
            list(sim.rounds())
    stop(sim)
    assert (tmp_path / "stopped" / "transcript.bin").read_bytes() != expected
    assert whole(SPECS[name], tmp_path / "stopped") == expected


def test_a_thing_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    expected = whole(SPECS["record"], tmp_path / "whole")
    seen = load_transcript(tmp_path / "whole").seen
    for cut in (1, 40, 300, len(expected) - 20):
        path = tmp_path / f"cut-{cut}.bin"
        path.write_bytes(expected[:-cut])
        again = FileTranscript(path)
        left = load_transcript(path).seen
        last = left[-1].round if left else 0
        for thing in (s for s in seen if s.round >= last):
            again.record(thing)
        again.close()
        assert path.read_bytes() == expected


def test_without_looking_at_what_is_there_rounds_come_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    expected = whole(SPECS["record"], tmp_path / "whole")
    sim = run(SPECS["record"], tmp_path / "stopped")
    with monkeypatch.context() as only_here:
        STOPS["before the checkpoint"](only_here)
        with pytest.raises(Stopped):
            list(sim.rounds())
    stop(sim)
    monkeypatch.setattr(transcript_file, "_key", lambda seen: id(seen))
    assert len(whole(SPECS["record"], tmp_path / "stopped")) > len(expected)


def test_damage_is_one_line(tmp_path: Path) -> None:
    good = whole(SPECS["record"], tmp_path / "run")
    path = tmp_path / "t.bin"
    for bad in (
        b"something else\n" + good,
        good.replace(b'"kind": "message"', b'"kind": "massage"', 1),
        flip(good),
    ):
        path.write_bytes(bad)
        with pytest.raises(UserError, match="damaged or no transcript of this version"):
            load_transcript(path)
    with pytest.raises(UserError, match="there is no transcript"):
        load_transcript(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b'{"party": "a", "round": null, "kind": "message", "sender": "b", "bytes": 0, "digest": ""}',
        b'{"party": "a", "round": 1e999, "kind": "message", "sender": "b", "bytes": 0, "digest": ""}',
        b'{"party": ["a"], "round": 0, "kind": "message", "sender": "b", "bytes": 0, "digest": ""}',
        b'{"party": "a", "round": 0, "kind": "message", "sender": "\\ud800", "bytes": 0, "digest": ""}',
        b'{"party": "a", "round": 0, "kind": "message", "sender": "b", "bytes": 0}',
    ],
)
def test_a_forged_line_is_one_line(line: bytes, tmp_path: Path) -> None:
    """An auditor reads what a stranger wrote: no traceback, whatever it is."""
    path = tmp_path / "transcript.bin"
    path.write_bytes(transcript_file.FIRST_LINE + line + b"\n\n")
    with pytest.raises(UserError, match="damaged or no transcript of this version"):
        load_transcript(path)


def flip(good: bytes) -> bytes:
    """One bit of a message's contents."""
    at = len(good) // 2
    while b"{" in good[at - 8 : at + 8]:
        at += 1
    return good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]


def test_train_and_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from modicum.cli import run as command_line
    from modicum.cli.app import app

    written = mo.Watching(transcript=True)
    done = mo.train(federation(), method=SPECS["record"], rounds=2, folder=tmp_path / "python", watching=written)
    assert {s.round for s in mo.load_transcript(done.folder).seen} == {0, 1}
    (tmp_path / "x.toml").write_text(RECORD_LEVEL)
    out, other = str(tmp_path / "cli"), str(tmp_path / "without")
    assert command_line(app, ["run", str(tmp_path / "x.toml"), "--out", out, "--json", "--transcript"]) == 0
    assert {s.round for s in mo.load_transcript(out).seen} == {0, 1}
    assert command_line(app, ["run", "--resume", out, "--json"]) == 0
    assert command_line(app, ["run", str(tmp_path / "x.toml"), "--out", other, "--json"]) == 0
    assert not (tmp_path / "without" / "transcript.bin").exists()
    capsys.readouterr()
    assert command_line(app, ["run", "--resume", other, "--transcript"]) == 2
    assert "run.transcript is false there and true" in capsys.readouterr().err
    with pytest.raises(UserError, match="began without a transcript"):
        mo.train(federation(), method=SPECS["record"], folder=other, resume=True, watching=written)


@pytest.mark.parametrize("text", [RECORD_LEVEL, CLIENT_LEVEL], ids=["record", "client"])
def test_a_deployed_server_writes_what_it_saw(text: str, tmp_path: Path) -> None:
    text = text.replace("rounds = 2", "rounds = 2\ntranscript = true")
    with silos(tmp_path, text) as made:
        first = coordinator(tmp_path, Direct(made))
        first.step()
        first.close()
        finish(coordinator(tmp_path, Direct(made)))
    found = load_transcript(tmp_path / "server")
    for round in (0, 1):
        (*messages,) = (s for s in found.of("message") if s.round == round)
        assert [(s.party, s.sender) for s in messages] == [("(server)", n) for n in ("client-00", "client-01")]
        assert all(isinstance(decode(s.content), Noised) for s in messages)
        assert len([s for s in found.of("broadcast") if s.round == round]) == 2
        assert len([s for s in found.of("opened") if s.round == round]) == 2


def test_a_refusal_is_written_too(tmp_path: Path) -> None:
    kept = FileTranscript(tmp_path / "t.bin")
    kept.record(Seen("(server)", 0, "refusal", "a", b"plan-exhausted"))
    kept.close()
    assert load_transcript(tmp_path / "t.bin").of("refusal")[0].content == b"plan-exhausted"
