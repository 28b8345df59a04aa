"""The quick start, followed word by word from a table of one's own to predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from tests.docs import ROOT, Block, blocks, commands

PAGE = ROOT / "docs" / "quickstart.md"


def follow(page: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch, *, skip: tuple[str, ...]) -> None:
    """Every block in turn; of commands, those of this program."""
    monkeypatch.chdir(folder)
    space: dict[str, object] = {}
    for block in page:
        if block.language == "python":
            exec(compile(block.text, block.place, "exec"), space)
        elif block.language == "toml":
            Path("patients.toml").write_text(block.text)
        else:
            for words in commands(block):
                if words[0] == "modicum" and words[1] not in skip:
                    assert run(app, words[1:]) == 0


def test_the_quick_start_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(list(blocks(PAGE)), tmp_path, monkeypatch, skip=("compare", "doctor"))
    found = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert found["clients"] == 3
    assert found["accuracy"] > 0.75  # the larger class has about six tenths


@pytest.mark.heavy
def test_with_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(list(blocks(PAGE)), tmp_path, monkeypatch, skip=())
    assert (tmp_path / "runs" / "compared" / "report.html").exists()
