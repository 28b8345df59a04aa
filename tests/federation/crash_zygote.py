"""Runs tiny experiments in forked children that are killed with SIGKILL at a chosen or random moment.

One process pays for importing torch; each line on stdin is a job, each line on stdout its outcome.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modicum import runs
from modicum.federation import checkpoints, clients, records, server, simulation
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import set_up
from modicum.federation.transcript import Seen
from modicum.methods import Aqc, DpFedAvg, DpPfsd, DpSgd
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import SimulatedNoise
from modicum.report import write

torch.set_num_threads(1)

METHODS = {
    "individual": lambda: Aqc(batch=20, lr=1.0, steps=2),
    "convolution": lambda: DpSgd(batch=20, lr=0.5, steps=2),
    "personal": lambda: DpPfsd(batch=20),
    "trusted": lambda: DpFedAvg(view="trusted-server", rate=0.6, batch=20),
    "correlated": lambda: DpFedAvg(view="trusted-server", batch=20),
}


class Sent:
    """Appends a digest of everything that leaves, at the moment it leaves; survives a kill."""

    def __init__(self, path: Path, kind: str) -> None:
        self.kind = kind
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def flush(self) -> None:
        pass

    def record(self, seen: Seen) -> None:
        if seen.kind == self.kind:
            self.note(seen.round, seen.sender, seen.content)

    def note(self, round: int, sender: str, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest()
        os.write(self.file, json.dumps([round, sender, digest]).encode() + b"\n")


class Points:
    """Counts the moments around every durable step, and dies at the chosen one."""

    def __init__(self, number: int | None, name: str | None) -> None:
        self.passed: list[str] = []
        self.number, self.name = number, name

    def reach(self, name: str) -> None:
        at = len(self.passed) if self.name is None else self.passed.count(name)
        self.passed.append(name)
        if self.number == at and self.name in (None, name):
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.reach(f"before {name}")
            result = function(*arguments, **named)
            self.reach(f"after {name}")
            return result

        return wrapped


def experiment(kind: str) -> Experiment:
    federation = Federation.from_dataset("digits", clients=4, partition="iid", budgets=[2.0, 8.0])
    model = "cnn-small" if kind == "convolution" else "logistic"
    own: dict[str, Any] = {"noise": "correlated", "per_round": 2} if kind == "correlated" else {}
    return Experiment(federation=federation, method=METHODS[kind](), rounds=5, seed=7, model=model, **own)


def watch_steps(points: Points) -> None:
    for name in ("reserve", "settle_many", "prune_before", "declare"):
        setattr(Ledger, name, points.around(name, getattr(Ledger, name)))
    Ledger.settle_digests = points.around("settle_many", Ledger.settle_digests)  # type: ignore[method-assign]
    Ledger.create = points.around("create", Ledger.create)  # type: ignore[method-assign]
    records.MetricsFile.append = points.around("metrics", records.MetricsFile.append)  # type: ignore[method-assign]
    checkpoints.save_state = points.around("checkpoint", checkpoints.save_state)  # type: ignore[attr-defined]
    RunFolder.write = points.around("write", RunFolder.write)  # type: ignore[method-assign]
    write.draw, write.png = lambda *_: None, lambda *_: b""  # type: ignore[assignment]  # slow, and not compared


def send_before_settling(sent: Sent) -> None:
    """negative control: a client hands its message over first and settles afterwards."""
    settle_many = Ledger.settle_many

    def early(ledger: Ledger, settled: Any, **named: Any) -> None:
        pairs = list(settled)
        for token, message in pairs:
            if message:
                sent.note(token.release.round, token.release.client, message)
        settle_many(ledger, pairs, **named)

    Ledger.settle_many = early  # type: ignore[method-assign]


def checkpoint_before_settling() -> None:
    """negative control: the server counts a round as done when it proposes it."""
    propose = server.Server.propose

    def eager(self: server.Server) -> Any:
        state = self.state.to_dict()
        checkpoints.save_state(self._early_checkpoint, {**state, "round": state["round"] + 1})  # type: ignore[attr-defined]
        return propose(self)

    begin = simulation.Simulation.__init__

    def remember(self: simulation.Simulation, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self.server._early_checkpoint = self._rounds.folder.checkpoint  # type: ignore[attr-defined, union-attr]

    server.Server.propose = eager  # type: ignore[method-assign]
    simulation.Simulation.__init__ = remember  # type: ignore[method-assign]


def state_of_the_broken_round() -> None:
    """negative control: a resumed client begins with the state that it had written in the round it does again."""
    begin = clients.Clients.__init__

    def later(self: clients.Clients, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **{**named, "done": named.get("done", 0) + 1})
        self._done -= 1

    clients.Clients.__init__ = later  # type: ignore[method-assign]


def draw_again() -> None:
    """negative control: a restarted process draws other noise, and answers a settled round afresh."""
    recall = clients.Clients._recall

    def forget(self: clients.Clients) -> None:
        recall(self)
        if any(self.ledger.charges()):
            self.noise = simulation.SimulatedNoise(8)

    clients.Clients._recall = forget  # type: ignore[method-assign]


def first_by_another_route() -> None:
    """negative control: what a process computes first comes by another route."""
    from tests.federation.determinism import break_it

    break_it("first by another route")


def child(job: dict[str, Any]) -> list[str]:
    folder = Path(job["folder"])
    kind = job["kind"]
    sent = Sent(Path(job["sent"]), "opened" if kind in ("trusted", "correlated") else "message")
    points = Points(job.get("point"), job.get("name"))
    watch_steps(points)
    match job.get("mutant"):
        case "send-before-settling":
            send_before_settling(sent)
        case "checkpoint-before-settling":
            checkpoint_before_settling()
        case "state-of-the-broken-round":
            state_of_the_broken_round()
        case "draw-again":
            draw_again()
        case "first-by-another-route":
            first_by_another_route()
    files = RunFolder(folder)
    files.make(fresh=False)
    runs.carry_out(experiment(kind), files, "", simulation=job["simulation"], transcript=sent)
    return points.passed


def perform(job: dict[str, Any]) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(child(job)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    started = time.monotonic()
    if job.get("after") is not None:
        time.sleep(job["after"])
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    failed = not killed and os.WEXITSTATUS(status) != 0
    passed = json.loads(text) if text else []
    return {"killed": killed, "failed": failed, "points": passed, "seconds": time.monotonic() - started}


def main() -> None:
    import safetensors.torch  # noqa: F401 - paid once, before the forks
    import sklearn.datasets  # noqa: F401
    import torch.fx.experimental.symbolic_shapes  # noqa: F401 - torch's own, at the first gradient

    set_up(experiment("individual"), SimulatedNoise(7))  # plans are priced once; nothing is computed of records

    for line in sys.stdin:
        print(json.dumps(perform(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
