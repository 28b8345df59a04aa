"""docs/coming-from-opacus.md, followed word by word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.errors import PrivacyWarning

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-opacus.md"


def test_the_page_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "bash", "python"]
    names: dict[str, object] = {}
    exec(blocks[0][1], names)
    assert 2.9 < float(capsys.readouterr().out) <= 3.0
    assert run(app, blocks[1][1].split()[1:]) == 0
    with pytest.warns(PrivacyWarning, match="used the same records"):
        exec(blocks[2][1], names)
    assert run(app, ["verify", "runs/second"]) == 0
