"""Silo files for tests, a silo process, and the server's side of the conversation as a script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Decision, Noised, decode, encode
from modicum.deploy.flower.signed import Take
from modicum.deploy.silo.envelope import seal, sign_answer
from modicum.deploy.silo.own import own_experiment
from modicum.deploy.silo.signing import make_signing_key, public_text, read_signing_key
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.terms import Join, Terms, digest
from modicum.deploy.silo.wire import SIGNATURE, Answer, Kind, ask
from modicum.federation.experiment import prepare
from modicum.federation.setup import adapts
from modicum.privacy.ledger import Ledger

EXPERIMENT = """
[data]
name = "digits"
clients = 3
partition = "iid"

[method]
name = "dp-sgd"
clip = 0.5
batch = 32
lr = 0.5
steps = 2

[run]
rounds = 4
seed = 7
"""

SILO = """
[silo]
name = "{name}"
experiment = "experiment.toml"
folder = "state-{name}"
socket = "{name}.sock"
simulation = {simulation}
{silo}

[grant]
budget = {budget}
{grant}
"""


def key_of(folder: Path, name: str) -> Path:
    """The key of a silo, or of the server."""
    return make_signing_key(folder / "keys" / name)


def with_keys(folder: Path, text: str) -> str:
    """An experiment file with everybody's public key in it."""
    line = f'server = "{public_text(key_of(folder, "server"))}"'
    text = text.replace("[run]\n", f"[run]\n{line}\n", 1) if "[run]\n" in text else f"{text}\n[run]\n{line}\n"

    def keyed(found: re.Match[str]) -> str:
        name, terms = found["name"], found["terms"]
        own = "" if "key = " in terms else f', key = "{public_text(key_of(folder, name))}"'
        return f"{name} = {{ {terms}{own} }}"

    return re.sub(r"^(?P<name>[\w-]+) = \{ (?P<terms>records = [^}]*?) \}", keyed, text, flags=re.MULTILINE)


def write_silo(
    folder: Path,
    name: str = "client-00",
    *,
    experiment: str = EXPERIMENT,
    budget: float = 2.0,
    simulation: bool = False,
    grant: str = "bounds = [0.01, 10.0]",
    silo: str = "",
    data: str = "",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(with_keys(folder, experiment))
    if "key = " not in silo:
        silo += f'\nkey = "{key_of(folder, name)}"'
    path = folder / f"{name}.toml"
    text = SILO.format(name=name, simulation=str(simulation).lower(), silo=silo, budget=budget, grant=grant)
    path.write_text(text + data)
    return path


def own_records(folder: Path, name: str, records: int = 120, *, poison: str = "") -> str:
    """A folder with one .npz file, and the [data] table that names it."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(records, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    if poison == "nan":
        x[5, 2] = np.nan
    if poison == "one class":
        y[:] = 0
    target = folder / f"records-{name}"
    target.mkdir(parents=True, exist_ok=True)
    np.savez(target / f"{name}.npz", x=x, y=y)
    return f'\n[data]\nnpz = "records-{name}"\nclasses = 2\n'


def start(path: Path) -> subprocess.Popen[bytes]:
    """A silo process; returns once it listens."""
    log = path.with_suffix(".log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-c", "from modicum.cli import main; main()", "silo", "serve", str(path)],
        stdout=log,
        stderr=log,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    log.close()
    wait_for(path, process)
    return process


def wait_for(path: Path, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(path.with_suffix(".log").read_text())
        try:
            ask(path.with_suffix(".sock"), Kind.HELLO, timeout=5)
            return
        except ValueError:
            time.sleep(0.05)
    raise AssertionError("the silo did not start")


@contextmanager
def serving(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start(path)
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], signum: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(signum)
    process.wait(timeout=30)


class Carries:
    """A carrier of tests: `ask` gives what comes back in each silo's name."""

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        raise NotImplementedError

    def carry(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float, take: Take) -> None:
        for name, given in self.ask(kind, bodies, seconds).items():
            take(name, given)


def ask_silo(silo: Silo, kind: Kind, body: bytes) -> Answer:
    """What the server asks, whose key lies beside the silo's."""
    run = silo.taking_part.join.run if silo.taking_part else ""
    key = read_signing_key(silo.spec.key.with_name("server"))
    return silo.answer(kind, seal(key, kind, silo.spec.name, run, body))


def content_of(sealed: bytes) -> bytes:
    """What a signed request holds."""
    start = SIGNATURE + 2
    return sealed[start + int.from_bytes(sealed[SIGNATURE:start], "little") :]


def resigned(silo: Silo, kind: Kind, body: bytes, answer: Answer) -> Answer:
    """A silo that lies signs its lies."""
    return sign_answer(read_signing_key(silo.spec.key), kind, body, answer)


@contextmanager
def opened(path: Path) -> Iterator[Server]:
    """A silo in this process: the same checks without the wait for another interpreter."""
    silo = Silo(read_spec(path))
    try:
        yield Server(path, silo=silo)
    finally:
        silo.close()


@dataclass
class Server:
    """The server's side of the conversation: honest unless told otherwise, and it keeps every byte it gets."""

    path: Path  # the silo's file
    run: str = "run-1"
    names: Sequence[str] = ("client-00", "client-01", "client-02")
    sent: dict[int, list[bytes]] = field(default_factory=dict)
    silo: Silo | None = None  # asked directly where given, else over its socket

    @property
    def socket(self) -> Path:
        return self.path.with_suffix(".sock")

    def ask(self, kind: Kind, body: bytes = b"") -> Answer:
        return self.deliver(kind, self.sealed(kind, body))

    def sealed(self, kind: Kind, body: bytes) -> bytes:
        key = read_signing_key(key_of(self.path.parent, "server"))
        return seal(key, kind, self.path.stem, "" if kind is Kind.HELLO else self.run, body)

    def deliver(self, kind: Kind, body: bytes) -> Answer:
        if self.silo is not None:
            return self.silo.answer(kind, body)
        return ask(self.socket, kind, body, timeout=60)

    def card(self) -> dict[str, Any]:
        return self.ask(Kind.HELLO).json()

    def invitation(self, **changes: Any) -> Join:
        card = self.card()
        spec = read_spec(self.path)
        terms, own_data = Terms(spec.experiment, tuple(self.names)), own_experiment(spec)
        budget = float("inf") if card["budget"] is None else card["budget"]
        own = ClientFacts(
            card["name"], card["records"], budget, terms.participations(card["name"]), card["validation"]
        )
        facts = tuple(
            own if n == own.name else ClientFacts(n, 100, 1.0, terms.participations(n)) for n in self.names
        )
        plan = terms.plans((own,), own_data, prepare(own_data, terms.method))[0][own.name]
        multipliers = dict.fromkeys(self.names, 1.0) | {own.name: terms.multiplier(plan)}
        tickets = dict.fromkeys(self.names, "") | {own.name: card["ticket"]}
        told = (terms.spec.to_dict(), facts, multipliers, adapts(plan), tickets)
        join = Join(self.run, digest(spec.experiment), *told)
        return replace(join, **changes)

    def join(self, **changes: Any) -> Answer:
        return self.ask(Kind.JOIN, self.invitation(**changes).encode())

    def dimension(self) -> int:
        card = self.card()
        return (int(np.prod(card["shape"])) + 1) * int(card["classes"])  # logistic regression

    def proposal(self, round: int, **changes: Any) -> Broadcast:
        model = torch.zeros(self.dimension())
        name = self.path.stem
        return replace(Broadcast(self.run, round, name, Decision(0.5), model), **changes)

    def propose(self, round: int, **changes: Any) -> Answer:
        answer = self.ask(Kind.ROUND, encode(self.proposal(round, **changes)))
        if answer.refused is None:
            self.sent.setdefault(round, []).append(answer.body)
        return answer

    def noise_std(self, round: int) -> float:
        """Of the message's noise, as a server derives it."""
        assert self.silo is not None
        assert self.silo.taking_part is not None
        expected = self.silo.taking_part.clients.expected(self.proposal(round))
        return float(expected.facts.variance**0.5)

    def messages(self) -> dict[int, Noised]:
        """What the bytes hold, after checking that no round was ever answered in two ways."""
        found = {}
        for round, blobs in self.sent.items():
            assert len(set(blobs)) == 1, f"round {round} left the silo in {len(set(blobs))} versions"
            message = decode(blobs[0])
            assert isinstance(message, Noised)
            found[round] = message
        return found


def ledger_of(path: Path) -> Ledger:
    return Ledger.open(path.parent / f"state-{path.stem}" / "ledger.sqlite", read_only=True)


def charged_rounds(path: Path) -> set[int]:
    ledger_file = path.parent / f"state-{path.stem}" / "ledger.sqlite"
    if not ledger_file.exists():
        return set()
    with ledger_of(path) as ledger:
        assert not ledger.violations
        return {release.round for release in ledger.spent(path.stem)}
