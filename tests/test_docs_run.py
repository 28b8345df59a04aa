"""Every command of this program in the guides is run, in shorter runs than a reader's, or another test runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from modicum.cli import run
from modicum.cli.app import app
from tests.docs import ROOT, all_blocks, commands

SOME = ["--set", "run.rounds=3"]
SHORTER = {  # what is put behind a command, so that it ends soon
    "run": SOME,
    "compare": [*SOME, "--seeds", "2", "--workers", "1"],
    "fit-clipping": [*SOME, "--set", "fit.seeds=1"],
    "fit-agent": [*SOME, "--episodes", "1", "--held-out", "1"],
    "fit-metanet": [
        *SOME,
        *(word for key in ("runs", "held_out", "passes", "epochs") for word in ("--set", f"metanet.{key}=1")),
    ],
    "attack": ["--attack", "bayes", "--targets", "1"],
    "audit": ["--canaries", "50"],
}
BEFORE = {  # what a page takes for granted
    "docs/audits.md": [["run", "examples/digits.toml", "--out", "runs/digits-seed0", *SOME]],
    "docs/silo-account.md": [["flower", "init", "."]],
}
ELSEWHERE = {  # who runs it, or why nobody does
    ("bench",): "tests/bench plays each with toy settings",
    ("flower", "up"): "tests/deploy/flower/test_deployment.py",
    ("flower", "start"): "tests/deploy/flower/test_deployment.py",
    ("flower", "superlink"): "tests/deploy/flower/test_readme.py pastes the README of a project",
    ("flower", "register"): "tests/deploy/flower/test_readme.py pastes the README of a project",
    ("flower", "status"): "tests/deploy/flower/test_follow.py",
    ("look", "heart.toml"): "tests/preparing/test_look.py: the records are a download",
    ("run", "examples/cifar-10-imagenet.toml"): "tests/models/test_published.py: all are downloads",
    ("silo", "status"): "tests/deploy/silo/test_watched.py",
    ("silo", "withdraw"): "tests/deploy/silo/test_withdrawal.py",
    ("silo", "serve"): "tests/deploy: it serves until stopped",
    ("studio",): "tests/studio: it serves until stopped",
    ("check", "own_methods:Curious"): "tests/methods/test_add_a_method.py writes such a method",
    ("theory", "pac-dp", "--curve"): "tests/cli/test_theory.py: the curve is in a clone",
    (
        "run",
        "examples/papers/pac-dp/heart-disease.toml",
    ): "tests/test_config.py reads it: the records are a download",
    ("run", "examples/papers/acdp-pfsd/emnist.toml"): "tests/test_config.py reads it: a download, and hours",
    ("run", "examples/papers/fedmap/fashion-mnist.toml"): "tests/test_config.py reads it: a download, and hours",
    ("run", "examples/papers/fedcompdp/cifar-10.toml"): "tests/test_config.py reads it: a download, and a GPU",
    ("run", "patients.toml"): "tests/test_quickstart.py follows the page",
    ("compare", "patients.toml"): "tests/test_quickstart.py follows the page",
    ("verify", "runs/own"): "tests/loops/test_opacus_page.py follows the page",
    ("verify", "runs/first"): "tests/test_quickstart.py follows the page",
    ("verify", "runs/first/server"): "tests/deploy/flower/test_deployment.py",
    ("verify", "runs/first/silos/state-client-00"): "tests/deploy/flower/test_deployment.py",
    ("run", "examples/digits.toml", "--ray"): "tests/federation/test_cluster.py: Ray is an extra",
    ("run", "examples/digits.toml", "--track"): "tests/test_track.py: trackers are extras",
}


def elsewhere(words: list[str]) -> bool:
    return any(tuple(words[: len(known)]) == known for known in ELSEWHERE)


def by_page() -> dict[str, list[list[str]]]:
    """The commands of each page, in order, without the program's name."""
    found: dict[str, list[list[str]]] = {}
    for block in all_blocks("bash", "console"):
        for words in commands(block):
            if words[:1] == ["modicum"] and not elsewhere(words[1:]):
                found.setdefault(block.page, []).append(words[1:])
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("page", by_page())
def test_the_commands_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before, asked = BEFORE.get(page, []), by_page()[page]
    if any(word.startswith("examples/") for words in (*before, *asked) for word in words):
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for words in before:
        assert run(app, words) == 0
    for words in asked:
        assert run(app, [*words, *SHORTER.get(words[0], [])]) == 0, f"{words}: {capsys.readouterr().err}"
    torch.set_num_threads(threads)


def test_who_runs_the_others_is_there() -> None:
    """A reason that names a test names one that exists."""
    for why in ELSEWHERE.values():
        named = why.split()[0].rstrip(":")
        assert (ROOT / named).exists(), why
