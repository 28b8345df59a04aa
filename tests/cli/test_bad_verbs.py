"""Ten bad inputs and more for verbs that watch and check a deployment, and for `doctor`: one line, exit 2.

`flower keys` has its table in tests/deploy/flower/test_keys.py, others have theirs beside this file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from modicum.deploy.flower.follow import STARTED
from modicum.deploy.flower.project import STATUS
from tests.cli.commands import Call, contents

PROJECT = """\
[tool.flwr.app.config]
folder = "{at}/server"
experiment = "{at}/experiment.toml"
silos = "{at}/silos.toml"
"""
EXPERIMENT = '[data]\ncsv = "{at}/records.csv"\nclasses = 2\n[run]\nrounds = 2\n'
SILO = '[silo]\nname = "a"\nexperiment = "../experiment.toml"\n[grant]\nbudget = 1.0\n'
OWN = '[data]\ncsv = "records.csv"\nclasses = 2\n'
CSV = "age,label\n" + "".join(f"{i},{i % 2}\n" for i in range(12))
BROKEN = {
    "binary": b"\xff\xfe\x00",
    "nonsense": b"[tool",
    "other": b'[project]\nname = "mine"\n',
    "half": b'[tool.flwr.app.config]\nfolder = "x"\n',
    "number": b'[tool.flwr.app.config]\nfolder = 3\nexperiment = "x"\nsilos = "y"\n',
    "list": b"tool = []\n",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two silos, broken ones beside it, and files of silos with a slip each."""
    at = tmp_path_factory.mktemp("verbs")
    (at / "app").mkdir()
    (at / "server").mkdir()
    for name, content in BROKEN.items():
        (at / name).mkdir()
        (at / name / "pyproject.toml").write_bytes(content)
    (at / "empty").mkdir()
    (at / "file").write_text("")
    (at / "bytes").write_bytes(b"\xff\xfe\x00")
    (at / "silos").mkdir()
    for name, text in silos().items():
        (at / "silos" / f"{name}.toml").write_text(text)
    (at / "silos" / "records.csv").write_text(CSV)
    (at / "silos" / "empty.csv").write_text("")
    (at / "silos" / "words.csv").write_text("age,label\nold,0\nyoung,1\n")
    return at


def silos() -> dict[str, str]:
    return {
        "good": SILO + OWN,
        "unnamed": SILO.replace('name = "a"\n', "") + OWN,
        "ungranted": SILO.replace("budget = 1.0\n", "") + OWN,
        "negative": SILO.replace("1.0", "-1.0") + OWN,
        "table": SILO + OWN + "[grants]\nbudget = 1.0\n",
        "key": SILO + "smallest = 1\n" + OWN,
        "lost": SILO.replace("experiment.toml", "lost.toml") + OWN,
        "nocsv": SILO + OWN.replace("records", "nothing"),
        "emptycsv": SILO + OWN.replace("records", "empty"),
        "unlabelled": SILO + OWN + 'label_column = "ill"\n',
        "folder": SILO + OWN.replace("csv", "npz"),
        "classless": SILO + OWN.replace("classes = 2\n", ""),
        "words": SILO + OWN.replace("records", "words"),
    }


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may break further."""
    at = shutil.copytree(made, tmp_path / "here")
    (at / "app" / "pyproject.toml").write_text(PROJECT.format(at=at))
    (at / "experiment.toml").write_text(EXPERIMENT.format(at=at / "silos"))
    monkeypatch.chdir(at)
    return at


def projects() -> Iterator[tuple[str, ...]]:
    yield from ((name,) for name in (*BROKEN, "empty", "file", "nowhere", "app/pyproject.toml"))
    yield from ((), ("app", "other", "another"), ("app", "--nothing"))


BAD: dict[tuple[str, ...], list[tuple[str, ...]]] = {
    ("flower", "status"): [*projects(), ("app", "--json=yes")],
    ("flower", "logs"): [*projects(), *(("app", "--lines", n) for n in ("0", "-3", "all", "1.5")), ("app",)],
    ("flower", "stop"): [*projects(), ("app",), ("app", "--now")],
    ("silo", "check"): [
        *((f"silos/{name}.toml",) for name in silos() if name != "good"),
        *((name,) for name in ("nowhere", "empty", "bytes", "nonsense/pyproject.toml")),
        *((), ("silos/good.toml", "--sugest"), ("silos/good.toml", "other")),
    ],
    ("silo", "check", "--suggest"): [
        *((f"silos/{name}.toml",) for name in ("nocsv", "emptycsv", "unlabelled", "folder", "classless", "lost")),
        *((name,) for name in ("silos/unnamed.toml", "nowhere", "empty", "bytes")),
    ],
    ("doctor",): [
        *(("x",), ("--jsn",), ("--json=1",), ("--json", "x"), ("-j",), ("--json", "--verbose"), ("--version",)),
        *(("--out", "x"), ("--", "x"), ("--help=yes",)),
    ],
}
CASES = [(verb, words) for verb, several in BAD.items() for words in several]


def test_every_verb_has_ten() -> None:
    assert {verb: len(several) for verb, several in BAD.items() if len(several) < 10} == {}


@pytest.mark.parametrize(("verb", "words"), CASES, ids=lambda words: " ".join(words) or "nothing")
def test_bad_input_is_one_line(call: Call, place: Path, verb: tuple[str, ...], words: tuple[str, ...]) -> None:
    before = contents(place)
    code, out, err = call(*verb, *words)
    assert (code, out) == (2, ""), err
    assert err.startswith("modicum: ")
    assert err.count("\n") == 1
    assert contents(place) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"run_id": 1}', b"\xff", b"null"])
def test_what_a_run_said_of_itself_may_be_damaged(call: Call, place: Path, content: bytes) -> None:
    (place / "server" / STARTED).write_bytes(content)
    (place / "server" / STATUS).write_bytes(content)
    code, out, err = call("flower", "stop", "app")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = call("flower", "status", "app", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["state"] == "waiting"
