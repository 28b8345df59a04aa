"""A round's worth of clients with made-up records, real reservations and a real gate, for measurements."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Decision, Message, encode
from modicum.core.optimisers import Sgd
from modicum.core.parts import Asked, Backend, Batch, ClientKit, Job, Mechanism, State
from modicum.core.release_gate import ReservedGate
from modicum.policies.fixed import Fixed
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.plan import PrivacyPlan
from modicum.training.plain import Supervised

BUDGET = 1000.0  # wide enough for any number of measured rounds; the noise does not depend on it
ROUNDS = 1000


def records(count: int, shape: Sequence[int], classes: int, seed: int, device: str = "cpu") -> Batch:
    """Random records: clipping and noise cost the same on any data."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator)
    y = torch.randint(0, classes, (count,), generator=generator)
    return Batch(x.to(device), {"y": y.to(device)})


@dataclass
class Cohort:
    """Clients that take part in every round. A round is reserved, computed and settled as in a simulation."""

    mechanism: Mechanism
    kit: ClientKit
    first: Tensor
    data: Sequence[Batch]
    decisions: Sequence[Decision]
    plans: dict[str, PrivacyPlan]
    ledger: Ledger
    noise: SimulatedNoise
    round: int = 0

    @classmethod
    def make(
        cls,
        model: nn.Module,
        backend: Backend,
        mechanism: Mechanism,
        data: Sequence[Batch],
        bounds: Sequence[float] | None = None,
    ) -> Cohort:
        first = backend.layout.read(model)
        shared = torch.ones(len(first), dtype=torch.bool, device=first.device)
        kit = ClientKit(backend, Supervised(Sgd(0.1)), Fixed(1.0), shared)
        names = [f"client-{i:03d}" for i in range(len(data))]
        plan = mechanism.plan(_facts("any", data[0]), ())
        plans = {name: replace(plan, client=name) for name in names}
        noise = SimulatedNoise(0)
        folder = Path(tempfile.mkdtemp(prefix="modicum-bench-"))
        ledger = Ledger.create(folder / "ledger.sqlite", "bench", noise)
        ledger.declare(plans.values())
        decisions = [Decision(bound) for bound in bounds or [1.0] * len(data)]
        return cls(mechanism, kit, first, data, decisions, plans, ledger, noise)

    def reserve(self) -> list[Job]:
        """The next round's jobs, with permission to release: all in one transaction, as in a simulation."""
        self.round += 1
        asked = [
            Broadcast("bench", self.round, name, decision, self.first)
            for name, decision in zip(self.plans, self.decisions, strict=True)
        ]
        facts = [_facts(name, data) for name, data in zip(self.plans, self.data, strict=True)]
        events = [
            self.mechanism.events(Asked(f, self.plans[f.name], b, self.round), self.kit)
            for f, b in zip(facts, asked, strict=True)
        ]
        tokens = iter(self.ledger.reserve([event for some in events for event in some]))
        gates = [ReservedGate(self.noise, [next(tokens) for _ in some]) for some in events]
        return [
            Job(f, self.plans[f.name], b, self.round, data, data, {}, self.round, gate)
            for f, data, b, gate in zip(facts, self.data, asked, gates, strict=True)
        ]

    def run(self, jobs: Sequence[Job], at_once: int) -> list[tuple[Message, State]]:
        """Local training, clipping and noise."""
        parts = [jobs[i : i + at_once] for i in range(0, len(jobs), at_once)]
        return [result for part in parts for result in self.mechanism.run(part, self.kit)]

    def settle(self, jobs: Sequence[Job], results: Sequence[tuple[Message, State]]) -> None:
        """Encode every message and store it in the ledger."""
        messages = [(job.gate.tokens[0], _bytes(message)) for job, (message, _) in zip(jobs, results, strict=True)]
        self.ledger.settle_many(messages)
        self.ledger.prune_before(self.round)


def _bytes(message: Message) -> bytes:
    """As it is sent; the bare numbers where safetensors is not installed."""
    try:
        return encode(message)
    except ImportError:
        return bytes(message.update.cpu().numpy().tobytes())


def _facts(name: str, data: Batch) -> ClientFacts:
    return ClientFacts(name, len(data), BUDGET, ROUNDS)
