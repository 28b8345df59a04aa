"""Certificates that an auditor reads without any ledger: signatures, figures, and the server's transcript."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from modicum.cli.app import app
from modicum.deploy.silo import attested
from modicum.deploy.silo.attested import Part, read_attested
from modicum.deploy.silo.signing import read_signing_key
from modicum.errors import UserError
from modicum.federation.transcript_file import FileTranscript, load_transcript
from tests.deploy.silo.helpers import key_of
from tests.deploy.test_restored_account import TEXT, play

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two silos with real noise and a transcript; the auditor's file beside it."""
    root = tmp_path_factory.mktemp("run")
    play(root, 1, TEXT.replace("rounds = 1", "rounds = 2\ntranscript = true"))
    out = root / "run.attested.json"
    done = RUNNER.invoke(app, ["certificate", "export", str(root / "run-1" / "server"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "signed by (server), clinic, ward" in done.output
    return root


def checked(run: Path, *more: str, file: Path | None = None) -> tuple[int, str]:
    done = RUNNER.invoke(app, ["verify", str(file or run / "run.attested.json"), *more])
    return done.exit_code, done.output


def test_one_file_is_enough(run: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(run / "run.attested.json", tmp_path))
    code, said = checked(run, file=alone)
    assert code == 0, said
    assert "claimed, not checked: where the noise came from (cryptographic)" in said
    assert "claimed, not checked: that these keys are those of server and silos" in said
    assert "\\n" not in said
    assert said.count("Match: the certificate follows from the ledger") == 3
    assert said.rstrip().endswith("Match: signatures and figures of (server), clinic, ward hold.")


def test_the_agreed_keys_and_the_transcript(run: Path) -> None:
    more = ("--experiment", str(run / "experiment.toml"), "--transcript", str(run / "run-1" / "server"))
    code, said = checked(run, *more)
    assert code == 0, said
    assert "transcript 4 messages as the silos settled them" in said
    assert "that these keys" not in said
    found = json.loads(checked(run, *more, "--json")[1])
    assert (found["match"], found["messages"], set(found["parts"])) == (True, 4, {"(server)", "clinic", "ward"})


def altered_transcript(run: Path, to: Path) -> Path:
    """One byte of a message changed; the file is a sound transcript."""
    changed = FileTranscript(to)
    for seen in load_transcript(run / "run-1" / "server").seen:
        if seen.kind == "message" and seen.sender == "ward" and seen.round == 1:
            content = bytearray(seen.content)
            content[-1] ^= 1
            seen = type(seen)(seen.party, seen.round, seen.kind, seen.sender, bytes(content))
        changed.record(seen)
    changed.close()
    return to


def test_an_altered_transcript_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = altered_transcript(run, tmp_path / "transcript.bin")
    code, said = checked(run, "--transcript", str(file))
    assert code == 1
    assert "MISMATCH  round 2: the transcript's message of ward is not what it settled" in said
    honest = attested._compared
    monkeypatch.setattr(attested, "_compared", lambda *given: (honest(*given)[0], [], []))  # the negative control
    assert checked(run, "--transcript", str(file))[0] == 0


def parts_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.attested.json").read_text())
    return found


def _epsilon(part: dict[str, Any]) -> None:
    part["certificate"]["clients"]["ward"]["epsilon"] *= 0.5


def _plan(part: dict[str, Any]) -> None:
    entry = part["entries"][1]
    entry[3] = entry[3].replace('"budget":2.0', '"budget":1.0')


def _dropped(part: dict[str, Any]) -> None:
    part["entries"].pop()


def _another_party(part: dict[str, Any]) -> None:
    part["party"] = "clinic-2"


def _nonsense(part: dict[str, Any]) -> None:
    part["entries"] += [["settle", None, 10**30, "{}"], ["settle", None, 1, "{"]]


def _twice(part: dict[str, Any]) -> None:
    part["entries"] += part["entries"]


CHANGES: list[Callable[[dict[str, Any]], None]] = [_epsilon, _plan, _dropped, _another_party, _nonsense, _twice]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("who", ["nobody", "a stranger", "the silo"])
def test_what_was_changed_is_refused(run: Path, tmp_path: Path, change: Callable[[Any], None], who: str) -> None:
    """Signed by nobody, or anew by a stranger; and a silo's own lie does not follow from its own entries."""
    value = parts_of(run)
    (index,) = (i for i, part in enumerate(value["parts"]) if part["party"] == "ward")
    change(value["parts"][index])
    if who != "nobody":
        path = key_of(tmp_path, "stranger") if who == "a stranger" else key_of(run, "ward")
        value["parts"][index] = vars(signed(Part(**value["parts"][index]), path))
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(value))
    more = ("--experiment", str(run / "experiment.toml"), "--transcript", str(run / "run-1" / "server"))
    code, said = checked(run, *more, file=file)
    assert code == 1, said
    assert "MISMATCH" in said


def signed(part: Part, key: Path) -> Part:
    from dataclasses import replace

    from modicum.deploy.silo.signing import raw_text

    private = read_signing_key(key)
    part = replace(part, key=raw_text(private))
    return replace(part, signature=private.sign(part._message()).hex())


def test_a_stranger_s_signature_counts_where_nobody_compares_keys(run: Path, tmp_path: Path) -> None:
    """The negative control: so the auditor is told to compare them."""
    value = parts_of(run)
    value["parts"] = [vars(signed(Part(**p), key_of(tmp_path, f"for {p['party']}"))) for p in value["parts"]]
    file = tmp_path / "strangers.json"
    file.write_text(json.dumps(value))
    code, said = checked(run, file=file)
    assert (code, "that these keys are those of server and silos" in said) == (0, True)
    code, said = checked(run, "--experiment", str(run / "experiment.toml"), file=file)
    assert (code, said.count("not signed with its key")) == (1, 3)


def test_a_missing_party_is_named(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "ward.json"
    folder = run / "run-1" / "state-ward"
    assert RUNNER.invoke(app, ["certificate", "export", str(folder), "--out", str(out)]).exit_code == 0
    code, said = checked(run, file=out)
    assert (code, "its certificate is not in the file" in said) == (0, True)
    code, said = checked(run, "--experiment", str(run / "experiment.toml"), file=out)
    assert (code, "clinic is a party of the experiment, and its certificate is missing" in said) == (1, True)


def test_who_is_left_out_is_named_without_the_experiment_too(run: Path, tmp_path: Path) -> None:
    """The server's own certificate tells who took part: nobody takes a silo out of the file unseen."""
    value = parts_of(run)
    value["parts"] = [part for part in value["parts"] if part["party"] != "ward"]
    file = tmp_path / "without.json"
    file.write_text(json.dumps(value))
    code, said = checked(run, file=file)
    assert (code, "claimed, not checked: what ward charged: its own certificate is not in" in said) == (0, True)
    assert "is not in" not in checked(run)[1]  # the control: nobody is left out


def test_one_key_for_two_parties_is_no_second_witness(run: Path, tmp_path: Path) -> None:
    value = parts_of(run)
    value["parts"] = [vars(signed(Part(**part), key_of(tmp_path, "stranger"))) for part in value["parts"]]
    file = tmp_path / "one.json"
    file.write_text(json.dumps(value))
    code, said = checked(run, file=file)
    assert (code, said.count("another party signed with the same key")) == (1, 3)


def test_more_than_was_agreed_is_refused(run: Path, tmp_path: Path) -> None:
    """All parties may sign a run that is sound and is not the one that they had promised."""
    text = (run / "experiment.toml").read_text()
    assert text.count("budget = 2.0") >= 2
    for budget, code in (("1.9", 1), ("2.0", 0)):
        file = tmp_path / "experiment.toml"
        file.write_text(text.replace("budget = 2.0", f"budget = {budget}"))
        found, said = checked(run, "--experiment", str(file))
        assert (found, "and 1.9 was agreed" in said) == (code, bool(code)), said


def test_messages_that_a_transcript_lacks_are_counted(run: Path, tmp_path: Path) -> None:
    changed = FileTranscript(tmp_path / "transcript.bin")
    for seen in load_transcript(run / "run-1" / "server").seen:
        if (seen.kind, seen.sender, seen.round) != ("message", "ward", 1):
            changed.record(seen)
    changed.close()
    code, said = checked(run, "--transcript", str(tmp_path / "transcript.bin"))
    assert (code, "that 1 message which ward settled never came" in said) == (0, True)
    assert "never came" not in checked(run, "--transcript", str(run / "run-1" / "server"))[1]


START = '{"schema": "modicum-attested/1", "parts": '


@pytest.mark.parametrize(
    "text",
    ["{", "{}", START + "[]}", START + "[{}]}", START + "3}", START.replace("/1", "/2") + "[]}", "[" * 10**5],
)
def test_what_is_no_certificate_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"odd\.json") as refused:
        read_attested(file)
    assert "\n" not in str(refused.value)


def test_a_part_that_nests_without_end_is_refused(run: Path) -> None:
    """What can just be parsed could not be written again: a silo would end its server's run with it."""
    value = parts_of(run)["parts"][0]
    for _ in range(5000):
        value["certificate"] = {"a": value["certificate"]}
    with pytest.raises(UserError, match="nested without end"):
        Part.from_dict(value)
    with pytest.raises(RecursionError):  # the negative control
        Part(**value).signed()
