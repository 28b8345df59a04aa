"""`modicum flower up` as a user meets it: it ends cleanly however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.deploy.flower.helpers import RECORD_LEVEL, alone


def _marked(home: Path) -> list[int]:
    wanted = f"FLWR_HOME={home}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _hear_ctrl_c() -> None:
    """A shell starts its background jobs deaf to it, and tests may be such a job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.heavy),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.soak),
    ],
    ids=["ctrl-c", "kill -9"],
)
def test_it_takes_everything_down_with_it(tmp_path: Path, signum: int, code: int) -> None:
    (tmp_path / "e.toml").write_text(RECORD_LEVEL)
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        "from modicum.cli import main; main()",
        "flower",
        "up",
        str(tmp_path / "e.toml"),
    ]
    with alone(), open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--out", str(out)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_hear_ctrl_c,
        )
        try:
            end = time.monotonic() + 120
            while len(_marked(out / "flower")) < 5 and time.monotonic() < end:  # silos, link, nodes
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
            os.kill(process.pid, signum)
            assert process.wait(60) == code
        finally:
            if process.poll() is None:
                process.kill()
        end = time.monotonic() + 45
        while _marked(out / "flower") and time.monotonic() < end:
            time.sleep(0.3)
        assert _marked(out / "flower") == []
    if signum == signal.SIGINT:
        assert "continue with: modicum flower up" in (tmp_path / "log").read_text()
