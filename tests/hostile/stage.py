"""A federation of scripted silos under the real coordinator: three are honest, one sends whatever a test likes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modicum.config import read
from modicum.core.messages import Broadcast, Noised, decode, encode
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo.envelope import sign_answer
from modicum.deploy.silo.signing import read_signing_key
from modicum.deploy.silo.terms import Terms, digest
from modicum.deploy.silo.versions import versions
from modicum.deploy.silo.wire import Answer, Kind
from modicum.federation.records import RoundRecord
from modicum.mechanisms.common import query
from tests.deploy.silo.helpers import Carries, content_of, key_of, with_keys

HONEST, HOSTILE = ("a", "b", "c"), "z"
NAMES = (*HONEST, HOSTILE)
VALIDATION = 40
Attack = Callable[[Broadcast, Noised], Answer | None]

EXPERIMENT = """
[data]
name = "digits"
clients = 4
[privacy]
budgets = 8.0
[method]
name = "{method}"
{level}
clip = 0.5
aggregation = "{aggregation}"
[run]
rounds = {rounds}
seed = 3
simulation = true
[[run.metrics]]
every = 1
noise_multiplier = 50.0
[run.silos]
{silos}
"""


def text(aggregation: str = "mean", rounds: int = 12, method: str = "aqc") -> str:
    level = 'level = "client"' if method in ("aqc", "cgm-median") else 'view = "server-sees-messages"'
    silos = "\n".join(f"{n} = {{ records = 300, budget = 8.0, validation = {VALIDATION} }}" for n in NAMES)
    return EXPERIMENT.format(method=method, level=level, aggregation=aggregation, rounds=rounds, silos=silos)


def normal(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=sum(k << (20 * i) for i, k in enumerate(key))))


@dataclass
class Scripted(Carries):
    """A carrier. Honest silos clip a fixed update to the bound and add the noise of their plans. They do not look
    at the model, so that two runs differ by what the hostile silo did and by nothing else."""

    folder: Path
    attack: Attack | None = None  # None: the fourth silo is honest too
    absent: bool = False  # it never answers
    hello: Mapping[str, object] = field(default_factory=dict)  # what it says otherwise of itself
    joins: Answer = field(default_factory=lambda: Answer(b"{}"))
    sent: list[tuple[int, Tensor]] = field(default_factory=list)  # honest updates, by round
    asked: int = 0

    def __post_init__(self) -> None:
        self.terms = Terms(read(self.folder / "experiment.toml"), NAMES)
        self.facts = {f.name: f for f in self.terms.agreed()}

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        answers = {}
        for name, body in bodies.items():
            got = self.one(kind, name, content_of(body))
            if got is not None:
                answers[name] = sign_answer(read_signing_key(key_of(self.folder, name)), kind, body, got)
        return answers

    def one(self, kind: Kind, name: str, body: bytes) -> Answer | None:
        if kind == Kind.HELLO:
            return Answer(json.dumps({**self.card(name), **(self.hello if name == HOSTILE else {})}).encode())
        if kind != Kind.ROUND:
            return self.joins if name == HOSTILE else Answer(b"{}")
        proposal = decode(body)
        assert isinstance(proposal, Broadcast)
        assert bool(torch.isfinite(proposal.model).all())  # an honest silo would have refused it
        message = self.honest(proposal)
        if name != HOSTILE:
            self.sent.append((proposal.round, message.update))
            return Answer(encode(message))
        self.asked += 1
        if self.absent:
            return None
        return Answer(encode(message)) if self.attack is None else self.attack(proposal, message)

    def card(self, name: str) -> dict[str, object]:
        facts = self.facts[name]
        return {
            "name": name,
            "records": facts.records,
            "validation": facts.validation,
            "budget": facts.budget,
            "shape": [6],
            "classes": 2,
            "simulation": False,
            "digest": digest(self.terms.config),
            "agreed": {},
            "versions": versions(),
            "run": None,
            "ticket": "",
        }

    def honest(self, b: Broadcast) -> Noised:
        rng, C = normal(NAMES.index(b.client), b.round, 1), b.decision.bound
        plan = self.terms.plan(self.facts[b.client])
        blocks = query("update", C, self.terms.multiplier(plan), self.terms.method.policy.signals)
        d = b.model.numel()  # honest silos differ a little
        raw = normal(9, 2).standard_normal(d) + 0.1 * normal(NAMES.index(b.client), 2).standard_normal(d)
        clipped = raw * min(1.0, C / float(np.linalg.norm(raw)))
        update = clipped + blocks[0].noise_std * rng.standard_normal(len(raw))
        bit = 0.5 * (-1) ** b.round
        signals = {s.name: 0.5 + bit + s.noise_std * float(rng.standard_normal()) for s in blocks[1:]}
        metrics = {m: 0.5 + 25.0 * float(rng.standard_normal()) for m in b.metrics}
        return Noised(b.client, b.round, torch.from_numpy(update).to(b.model), signals, metrics)


def prepare(folder: Path, experiment: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(with_keys(folder, experiment))
    return folder


def coordinator(carrier: Scripted) -> Coordinator:
    config = read(carrier.folder / "experiment.toml")
    return Coordinator(
        config, NAMES, carrier.folder / "server", carrier, key_of(carrier.folder, "server"), Patience(1, 1, 1)
    )


def play(carrier: Scripted, restart_every: int = 10**9) -> tuple[Coordinator, list[RoundRecord]]:
    """The whole run; every so often the server dies and another one continues."""
    records: list[RoundRecord] = []
    made = coordinator(carrier)
    while not made.server.finished:
        records.append(made.step())
        if len(records) % restart_every == 0 and not made.server.finished:
            made.close()
            made = coordinator(carrier)
    made.close()
    return made, records


def unit(like: Tensor) -> Tensor:
    return torch.ones_like(like) / math.sqrt(like.numel())
