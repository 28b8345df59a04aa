"""Deployments on loopback, measured: seconds a round against in-process, bytes on the wire, and kills.

    python benchmarks/flower.py time --silos 20 --rounds 10
    python benchmarks/flower.py time --silos 3 --rounds 6 --secure
    python benchmarks/flower.py kills --of silo --kills 20 --rounds 20
    python benchmarks/flower.py kills --of server --kills 20 --rounds 40

Each prints one JSON object. Only loopback is used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import selectors
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from modicum.config import experiment, read
from modicum.deploy.flower.up import HOST, Deployment
from modicum.federation.records import read_records
from modicum.federation.simulation import Simulation
from modicum.privacy.ledger import Ledger
from modicum.privacy.verify import verify

EXPERIMENT = """
[data]
name = "digits"
clients = {silos}
partition = "iid"

[privacy]
budgets = [1.0, 4.0]
fixed_shapes = "auto"

[model]
name = "mlp"
hidden = {hidden}

[method]
name = "dp-sgd"
clip = 0.5
batch = 16
steps = 2

[run]
rounds = {rounds}
seed = 3
simulation = true
"""


SECURE = """view = "secure-aggregation"
colluding = 1
dropouts = 0
lr = 4.0
"""  # in the place of the method's settings: one step a round on the sum of all silos


class CountingProxy:
    """Passes TLS through unopened and counts it, both ways."""

    def __init__(self, target: int) -> None:
        self.target, self.up, self.down = target, 0, 0
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._pass, args=(link,), daemon=True).start()

    def _pass(self, link: socket.socket) -> None:
        try:
            with link, socket.create_connection((HOST, self.target)) as far, selectors.DefaultSelector() as ready:
                ready.register(link, selectors.EVENT_READ, far)
                ready.register(far, selectors.EVENT_READ, link)
                while True:
                    for key, _ in ready.select():
                        source: Any = key.fileobj
                        part = source.recv(65536)
                        if not part:
                            return
                        key.data.sendall(part)
                        if source is link:
                            self.up += len(part)
                        else:
                            self.down += len(part)
        except OSError:
            return


def made(folder: Path, silos: int, rounds: int, hidden: int, wait: float, *, secure: bool = False) -> Deployment:
    path, text = folder / "experiment.toml", EXPERIMENT.format(silos=silos, rounds=rounds, hidden=hidden)
    if secure:
        text = text.replace("clip = 0.5\nbatch = 16\nsteps = 2\n", SECURE)
        text = text.replace("[1.0, 4.0]", "8.0").replace("simulation = true", 'secure_aggregation = "protocol"')
        text = text.replace('fixed_shapes = "auto"\n', "")
    path.write_text(text)
    return Deployment(read(path), folder / "out", wait=wait)


def _processor(deployment: Deployment) -> dict[str, float]:
    """Seconds of a core that each kind of process has taken so far."""
    found: dict[str, float] = {}
    pids = {n: m.process.pid for n, m in deployment.crew.members.items() if m.process is not None}
    for name, pid in {**pids, "server": int(deployment.status().get("pid", 0))}.items():
        try:
            numbers = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        kind = name.split("-")[0]
        found[kind] = found.get(kind, 0.0) + (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    return found


def measure_time(silos: int, rounds: int, hidden: int, *, secure: bool = False) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    deployment = made(folder, silos, rounds, hidden, 900, secure=secure)
    proxy = CountingProxy(deployment.ports.nodes)
    watched = next(iter(deployment.budgets))
    plain = deployment.node_command

    def through_proxy(name: str) -> list[str]:
        command = plain(name)
        if name == watched:
            command[command.index(deployment.address)] = f"{HOST}:{proxy.port}"
        return command

    deployment.node_command = through_proxy  # type: ignore[method-assign]
    marks: list[tuple[float, int, int]] = []
    took: list[dict[str, float]] = []

    def mark(_: Any) -> None:
        marks.append((time.monotonic(), proxy.up, proxy.down))
        took.append(_processor(deployment))

    began = time.monotonic()
    with deployment.running(print):
        up = time.monotonic()
        deployment.run(mark, print)
    ended = time.monotonic()
    spent = marks[-1][0] - marks[0][0]
    over = max(len(marks) - 1, 1)
    again = time.monotonic()
    run = Simulation(experiment(read(folder / "experiment.toml")), folder / "in-process")
    for _ in run.rounds():
        pass
    in_process = (time.monotonic() - again) / rounds
    size = 4 * int(run.kit.shared.sum())
    from safetensors.torch import load_file

    deployed = load_file(deployment.at.server / "model.safetensors")
    own = run.backend.layout.named(run.model)
    gap = max(float((deployed[n] - own[n]).abs().max()) for n in own)
    wire = {"up": (marks[-1][1] - marks[0][1]) / over, "down": (marks[-1][2] - marks[0][2]) / over}
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return {
        "silos": silos,
        "secure": secure,
        "rounds": len(marks),
        "answered": [r.answered for r in read_records(deployment.at.server / "metrics.jsonl")],
        "seconds to start": round(up - began, 1),
        "seconds to the first round": round(marks[0][0] - up, 1),
        "seconds a round": round(spent / over, 2),
        "seconds of each round": [round(b[0] - a[0], 2) for a, b in itertools.pairwise(marks)],
        "processor seconds a round": {k: round((v - took[0].get(k, v)) / over, 3) for k, v in took[-1].items()},
        "seconds a round in-process": round(in_process, 4),
        "seconds in all": round(ended - began, 1),
        "model bytes": size,
        "wire bytes up per round": round(wire["up"]),
        "wire bytes down per round": round(wire["down"]),
        "up over model": round(wire["up"] / size, 3),
        "down over model": round(wire["down"] / size, 3),
        "largest child GiB": round(memory, 2),
        "largest difference to in-process": None if secure else gap,  # there the noise is real
        "restarts": deployment.crew.restarts,
        "left running": deployment.crew.leftovers(),
    }


def measure_looks(silos: int, seconds: float = 4.0) -> dict[str, Any]:
    """What it costs the SuperLink that nodes look for messages, five times a second each, where there are none."""
    deployment = made(Path(tempfile.mkdtemp()), silos, 1, 16, 900)
    with deployment.running(print):
        time.sleep(1.0)
        before = _processor(deployment)["superlink"]
        time.sleep(seconds)
        spent = _processor(deployment)["superlink"] - before
    return {"silos": silos, "SuperLink's processor seconds a node and second": round(spent / seconds / silos, 4)}


def measure_kills(what: str, kills: int, silos: int, rounds: int, seed: int) -> dict[str, Any]:
    """Kill -9 at random moments until the count is reached; the run has to complete all the same.

    A server takes about 20 s from its start to its first round here, so that kills must be further apart for it.
    """
    folder, rng = Path(tempfile.mkdtemp()), random.Random(seed)
    deployment = made(folder, silos, rounds, 16, 900)
    longest = 14.0 if what == "silo" else 50.0
    at_round: list[int] = []
    done: list[float] = []
    metrics = deployment.at.server / "metrics.jsonl"
    finished = threading.Event()

    def killer() -> None:
        while len(done) < kills and not finished.is_set():
            time.sleep(rng.uniform(2, longest))
            pid = _victim(deployment, what, rng)
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                done.append(time.monotonic())
                at_round.append(len(read_records(metrics)) if metrics.exists() else 0)

    began = time.monotonic()
    with deployment.running(print):
        threading.Thread(target=killer, daemon=True).start()
        deployment.run(lambda r: print("round", r.round, "answered", r.answered, "kills", len(done)), print)
        finished.set()
    records = read_records(deployment.at.server / "metrics.jsonl")
    return {
        "killed": what,
        "kills": len(done),
        "rounds": len(records),
        "killed at round": at_round,
        "each round once": [r.round for r in records] == list(range(rounds)),
        "answered": [r.answered for r in records],
        "restarts of silos, nodes and SuperLink": deployment.crew.restarts,
        "ledgers cover what was sent": _covered(deployment),
        "certificates verify": all(verify(deployment.at.state(n)).matches for n in deployment.budgets),
        "seconds": round(time.monotonic() - began, 1),
        "left running": deployment.crew.leftovers(),
    }


def _victim(deployment: Deployment, what: str, rng: random.Random) -> int:
    if what == "server":
        known = deployment.status()
        return int(known["pid"]) if known["state"] == "running" else 0
    name = "superlink" if what == "superlink" else f"silo-{rng.choice(list(deployment.budgets))}"
    process = deployment.crew.members[name].process
    return process.pid if process is not None and process.poll() is None else 0


def _covered(deployment: Deployment) -> bool:
    """No silo's ledger shows less than the server received from it."""
    answered = {r.round for r in read_records(deployment.at.server / "metrics.jsonl") if r.answered}
    for name in deployment.budgets:
        with Ledger.open(deployment.at.state(name) / "ledger.sqlite", read_only=True) as ledger:
            if ledger.violations or not answered <= {r.round for r in ledger.spent(name)}:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["time", "looks", "kills"])
    parser.add_argument("--silos", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--of", choices=["silo", "server", "superlink"], default="silo")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "time":
        found = measure_time(given.silos, given.rounds, given.hidden, secure=given.secure)
    elif given.what == "looks":
        found = measure_looks(given.silos)
    else:
        found = measure_kills(given.of, given.kills, given.silos, given.rounds, given.seed)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
