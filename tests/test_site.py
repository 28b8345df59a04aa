"""The site: it builds, has a page for every method and command, and a link that leads nowhere is an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from modicum.cli.app import app
from modicum.methods import METHODS

ROOT = Path(__file__).parents[1]


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    """Of a copy, in which pages can be spoiled."""
    for name in ("docs", "benchmarks", "examples", "src"):
        if not (folder / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    env = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-m", "mkdocs", "build"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.heavy
def test_every_method_and_command_has_a_page_and_a_dead_link_is_an_error(tmp_path: Path) -> None:
    done = built(tmp_path)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "build" / "site"
    commands: object = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert isinstance(commands, dict)
    for page in (*(f"methods/{name}" for name in METHODS), *(f"commands/{name}" for name in commands)):
        assert (site / f"{page}.html").exists(), page
    assert (
        "http"
        not in "".join(  # nothing is fetched from elsewhere
            part.split('"')[0] for part in (site / "index.html").read_text().split('src="')[1:]
        )
    )
    for dead in ("[gone](no-such-page.md)", "[gone](config.md#no-such-heading)"):
        page = tmp_path / "docs" / "models.md"
        whole = (ROOT / "docs" / "models.md").read_text()
        page.write_text(f"{whole}\n{dead}\n")
        spoiled = built(tmp_path)
        assert spoiled.returncode != 0
        assert "no-such" in spoiled.stderr
