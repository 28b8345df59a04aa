"""The Dockerfile's steps as scripts: they install what runs, and start what a deployment starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs import ROOT, parse

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_everything_that_is_copied_is_there() -> None:
    for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line


def test_entry_points_are_commands_or_scripts() -> None:
    entries = [json.loads(line) for line in re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.M)]
    (own, *default) = re.findall(r"^CMD (.*)$", DOCKERFILE, re.M)
    assert not default
    parse([*entries[0], *json.loads(own)])
    for shell, script in entries[1:]:
        assert shell == "sh"
        assert (ROOT / script.removeprefix("/opt/modicum/")).exists()
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == ["silo", "flower", "flower"]  # nobody is root


def started(script: str, program: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a script would start: a stand-in prints its arguments."""
    stand_in = folder / program
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["sh", str(ROOT / "containers" / script)], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_the_same_options_as_a_local_deployment(tmp_path: Path) -> None:
    """`flower up` is tested against real Flower; containers start the same."""
    source = (ROOT / "src/modicum/deploy/flower/up.py").read_text()
    superlink, node = (
        set(re.findall(r'"(--[\w-]+)"', source.split(f"def {name}")[1].split("def ")[0]))
        for name in ("superlink_command", "node_command")
    )
    server = started("server.sh", "flower-superlink", tmp_path)
    assert options(server.stdout.splitlines()) == superlink
    told = started("node.sh", "flower-supernode", tmp_path, SUPERLINK="a:1", NAME="ward", SOCKET="/s/s.sock")
    assert options(told.stdout.splitlines()) == node
    assert 'silo="/s/s.sock"' in told.stdout
    assert "keys/ward" in told.stdout
    missing = started("node.sh", "flower-supernode", tmp_path, NAME="ward")
    assert missing.returncode != 0
    assert "set SUPERLINK" in missing.stderr


@pytest.mark.heavy
def test_the_installation_runs(tmp_path: Path) -> None:
    """`install.sh` as the image runs it, in a new environment; dependencies are those of this one."""
    for name in ("pyproject.toml", "requirements.lock", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    home = tmp_path / "home"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
        "PIP_FLAGS": "--no-deps --no-index --no-build-isolation --quiet --force-reinstall",
    }
    command = ["sh", str(ROOT / "containers" / "install.sh")]
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("modicum ")
    assert (home / "bin" / "modicum").exists()
