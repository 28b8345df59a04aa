"""The generated README, pasted word by word into a shell: from nothing to a verified run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.federation.records import read_records
from modicum.privacy.verify import verify
from tests.deploy.flower.helpers import alone
from tests.deploy.flower.test_stranger import made


def pasted(folder: Path) -> list[str]:
    """The lines of the first block."""
    found = re.search(r"```\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def play(folder: Path, lines: list[str], seconds: float) -> str:
    """What the shell printed. All that it started ends with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    script = "set -e\n" + "\n".join(lines) + "\n"
    with open(folder / "shell.log", "w+") as log:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = shell.wait(seconds)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
            time.sleep(1)
        log.seek(0)
        said = log.read()
    assert code == 0, said[-3000:]
    return said


@pytest.mark.heavy
@pytest.mark.parametrize("order", ["written", "hospitals first"])
def test_the_readme_pasted_ends_in_a_verified_run(order: str, tmp_path: Path) -> None:
    """In the order of the README, and in that of a study whose server comes last: nodes wait and say for what."""
    folder, *_ = made(tmp_path / "study")
    file = folder / "experiment.toml"
    file.write_text(file.read_text().replace("rounds = 10", "rounds = 2"))
    lines = pasted(folder)
    if order != "written":
        lines = sorted(lines, key=lambda line: not line.rstrip().endswith(".sock &") and "silo serve" not in line)
        assert "superlink" in lines[-3]
        lines.insert(-3, "sleep 12")
    with alone():
        said = play(folder, lines, 240)
    assert [r.answered for r in read_records(folder / "server" / "metrics.jsonl")] == [2, 2]
    assert verify(folder / "server").matches
    assert verify(folder / "silos" / "state-ward-a").matches
    assert said.count("connected to") == 2
    if order != "written":
        assert "waiting for 127.0.0.1" in said


@pytest.mark.heavy
def test_behind_secure_aggregation_in_under_ten_minutes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began, folder = time.monotonic(), tmp_path / "study"
    names = ["--silos", "a,b,c", "--port", str(port), "--secure"]
    assert run(app, ["flower", "init", str(folder), *names]) == 0
    with alone():
        play(folder, pasted(folder), 600)
    print(f"from nothing to a secure run of 10 rounds: {time.monotonic() - began:.0f} s")
    assert verify(folder / "server").matches
    assert verify(folder / "silos" / "state-a").matches
    assert time.monotonic() - began < 600
