"""One client, or a few, through a mechanism, with everything in the test's hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor, nn

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Decision, Message, Opened
from modicum.core.optimisers import Sgd
from modicum.core.parts import Backend, Batch, ClientKit, Job, Mechanism, Policy, State
from modicum.core.release_gate import ReservedGate
from modicum.core.round_state import RoundState
from modicum.policies import Fixed
from modicum.privacy.events import Release
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.training.plain import Supervised

FALSE_ALARM = 1e-6  # of each statistical test, were it run with fresh randomness


class Silent(SimulatedNoise):
    """Real coins, no noise."""

    def normal(self, key: Any, size: int, std: float = 1.0, dtype: Any = "float64") -> Any:
        return np.zeros(size, dtype)


class OpenGate(ReservedGate):
    """Opens without a ledger, and remembers what went in and out."""

    def __init__(self, noise: NoiseSource) -> None:
        super().__init__(noise, ())
        self.private: list[tuple[Release, int, dict[str, Tensor]]] = []
        self.drawn: list[Tensor] = []

    def reserve(self, release: Release) -> bool:
        return True

    def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
        self._tokens.setdefault(release, None)  # type: ignore[arg-type]
        chosen = super().sample(release, step, records, present)
        self.drawn.append(chosen)
        return chosen

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.private.append((release, step, {name: value.clone() for name, value in sums.items()}))
        return super().release(release, step, sums)

    def _pass(self, release: Release, step: int) -> None:
        pass


def opened_of(mechanism: Mechanism, messages: Sequence[Message], state: RoundState) -> Opened | None:
    """What the server half makes of messages, added in the order of names."""
    collected = mechanism.collect(state)
    for message in sorted(messages, key=lambda m: m.client):
        collected.add(message)
    return collected.open()


@dataclass
class Stage:
    """A mechanism on a model, ready to run on any records."""

    mechanism: Mechanism
    backend: Backend
    policy: Policy = field(default_factory=Fixed)
    budget: float = 8.0
    participations: int = 1
    declared: int | None = None  # records that the client declares; None: those it has
    lr: float = 1.0

    def kit(self) -> ClientKit:
        shared = torch.ones(self.backend.layout.dimension, dtype=torch.bool)
        return ClientKit(self.backend, Supervised(Sgd(self.lr)), self.policy, shared)

    def job(
        self, name: str, records: Batch, theta: Tensor, noise: NoiseSource, round: int = 0, bound: float = 1.0
    ) -> Job:
        facts = ClientFacts(name, self.declared or len(records), self.budget, self.participations)
        sent = Broadcast("run", round, name, Decision(bound), theta)
        plan = self.mechanism.plan(facts, ())
        return Job(facts, plan, sent, 0, records, records, {}, 7, OpenGate(noise))

    def run(self, jobs: Sequence[Job]) -> list[tuple[Message, State]]:
        return self.mechanism.run(jobs, self.kit())


def double_model(kind: str, seed: int) -> nn.Module:
    """Small models in double precision, with layers that per-example clipping must get right."""
    torch.manual_seed(seed)
    models = {
        "linear": lambda: nn.Linear(6, 3),
        "dense": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)),
        "conv": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3)
        ),
    }
    return models[kind]().double()


def records(seed: int, n: int, scale: float = 1.0) -> Batch:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(scale * rng.normal(size=(n, 6)))
    return Batch(x, {"y": torch.from_numpy(rng.integers(0, 3, n))})


def loop(model: nn.Module) -> tuple[LoopBackend, Tensor]:
    backend = LoopBackend(model)
    return backend, backend.layout.read(model).clone()


def has_std(values: Tensor, std: float, false_alarm: float = FALSE_ALARM) -> bool:
    """Whether centred normal values can have this standard deviation: exact chi-square test, two-sided."""
    n = values.numel()
    statistic = float((values.double() / std).square().sum())
    return bool(chi2.ppf(false_alarm / 2, n) <= statistic <= chi2.isf(false_alarm / 2, n))
