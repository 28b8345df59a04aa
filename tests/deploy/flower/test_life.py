"""A federation over three runs, by the commands that `docs/deploy.md` has for it, over live Flower.

Two hospitals train; a third joins and the server's certificate is renewed, while the nodes of the first two go on
running; then one leaves. Each run begins with the model that the last one released.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from modicum.core.messages import Broadcast, decode
from modicum.deploy.flower.keys import Tls, check_tls
from modicum.deploy.silo.spec import read_spec
from modicum.federation.records import read_records
from modicum.federation.transcript_file import load_transcript
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.verify import verify
from tests.deploy.flower.helpers import alone, wait_until
from tests.deploy.flower.test_stranger import made

WARDS = ("ward-a", "ward-b", "ward-c")


class Life:
    """Everybody's processes and files, in one folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.port, _ = made(root)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        bin = Path(sys.executable).parent
        self.env = {**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def do(self, *words: str) -> str:
        done = subprocess.run(
            ["modicum", *words], cwd=self.root, env=self.env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def begin(self, name: str, *words: str) -> None:
        """A process that stays; another of its name ends before."""
        self.end(name)
        with open(self.root / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                ["modicum", *words], cwd=self.root, env=self.env, stdout=log, stderr=log
            )

    def end(self, *names: str) -> None:
        for name in names or tuple(self.running):
            if process := self.running.pop(name, None):
                process.send_signal(signal.SIGTERM)
                process.wait(30)

    def superlink(self) -> None:
        self.begin("superlink", "flower", "superlink", "app", "--listen", f"127.0.0.1:{self.port}")

    def node(self, ward: str) -> None:
        files = ("--ca", "keys/ca.crt", "--key", f"keys/{ward}", "--silo", f"silos/{ward}.sock")
        self.begin(f"node-{ward}", "flower", "node", f"127.0.0.1:{self.port}", *files)

    def edit(self, file: str, **changes: str) -> None:
        path, text = self.root / file, (self.root / file).read_text()
        for key, value in changes.items():
            text, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
            assert found, (file, key)
        path.write_text(text)

    def run(self, number: int, wards: tuple[str, ...]) -> Path:
        """With new folders and everybody's present file; the server's copy names the run before."""
        text, folder = (self.root / "experiment.toml").read_text(), self.root / f"server-{number}"
        begins = f'start = "server-{number - 1}"\n' if number > 1 else ""
        text = text.replace("[run]\n", f"[run]\ntranscript = true\n{begins}", 1)
        (self.root / "server.toml").write_text(text)
        self.edit("app/pyproject.toml", folder=f'"{folder}"', experiment=f'"{self.root / "server.toml"}"')
        for ward in wards:
            self.edit(f"silos/{ward}.toml", folder=f'"state-{number}-{ward}"')
            self.begin(f"silo-{ward}", "silo", "serve", f"silos/{ward}.toml")
        self.do("flower", "start", "app")
        return folder

    def drawn(self, ward: str) -> list[float]:
        with DatasetAccount.open(
            read_spec(self.root / "silos" / f"{ward}.toml").account_folder, read_only=True
        ) as a:
            return [draw.cost for draw in a.draws.values() if draw.counts]


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    with alone():
        found = Life(tmp_path / "study")
        try:
            yield found
        finally:
            found.end()


def flat(folder: Path) -> torch.Tensor:
    found = torch.cat([v.flatten() for v in load_file(folder / "model.safetensors").values()])
    return found.sort().values


def proposed_first(folder: Path) -> torch.Tensor:
    sent = decode(load_transcript(folder).of("broadcast")[0].content)
    assert isinstance(sent, Broadcast)
    return sent.model.sort().values


def a_hospital_joins(life: Life, ward: str) -> None:
    """At the hospital its keys and records; then its line in everybody's file."""
    life.do("flower", "keys", "node", f"keys/{ward}")
    key = life.do("silo", "key", f"silos/{ward}.key").strip()
    own = life.root / "silos" / f"records-{ward}"
    own.mkdir(mode=0o700)
    rng = np.random.default_rng(2)
    shape = np.load(life.root / "silos" / "records-ward-a" / "ward-a.npz")["x"].shape[1:]
    x = rng.uniform(size=(300, *shape)).astype(np.float32)
    np.savez(own / f"{ward}.npz", x=x, y=rng.integers(0, 10, 300))
    text = (life.root / "silos" / "ward-a.toml").read_text().replace("ward-a", ward)
    (life.root / "silos" / f"{ward}.toml").write_text(text)
    with open(life.root / "experiment.toml", "a") as file:
        file.write(f"{ward} = {{ records = 300, budget = 2.0, {key} }}\n")
    assert "added" in life.do("flower", "keys", "add", "app", ward, "--key", f"keys/{ward}.pub")


@pytest.mark.heavy
def test_one_joins_the_certificate_is_renewed_and_one_leaves(life: Life) -> None:
    life.edit("experiment.toml", rounds="2")
    life.superlink()
    for ward in WARDS[:2]:
        life.node(ward)
    life.do("flower", "register", "app")
    first = life.run(1, WARDS[:2])

    a_hospital_joins(life, "ward-c")
    life.node("ward-c")
    before = (life.root / "keys" / "server.crt").read_bytes()
    life.do("flower", "keys", "renew", "keys")
    assert (life.root / "keys" / "server.crt").read_bytes() != before
    check_tls(Tls(*(life.root / "keys" / name for name in ("ca.crt", "server.crt", "server.key"))))
    life.superlink()
    second = life.run(2, WARDS)
    assert [r.answered for r in read_records(second / "metrics.jsonl")] == [3, 3]
    assert torch.equal(proposed_first(second), flat(first))
    assert [len(life.drawn(ward)) for ward in WARDS] == [2, 2, 1]
    assert life.drawn("ward-a")[0] == life.drawn("ward-a")[1]  # the released model was free, the run was not

    life.do("flower", "keys", "revoke", "app", "ward-b")
    path = life.root / "experiment.toml"
    path.write_text("".join(x for x in path.read_text().splitlines(keepends=True) if not x.startswith('"ward-b"')))
    life.end("silo-ward-b")
    third = life.run(3, ("ward-a", "ward-c"))
    assert torch.equal(proposed_first(third), flat(second))
    assert [len(life.drawn(ward)) for ward in WARDS] == [3, 2, 2]
    for number, folder in enumerate((first, second, third), 1):
        assert verify(folder).matches
        assert verify(life.root / "silos" / f"state-{number}-ward-a").matches
    log = life.root / "node-ward-b.log"
    wait_until(lambda: "waiting for" in log.read_text().split("connected to")[-1], 60, "its node is turned away")
    lines = log.read_text().splitlines()
    assert len(lines) < 20, "a node's log grows with what happens, not with time"
