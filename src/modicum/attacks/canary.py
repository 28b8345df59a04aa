"""Canary audit: plant one unit, run the real code many times with and without it, and try to tell which it was.

A trial is one client (or one cohort) with its own plan in a real ledger. Nothing of the mechanism is replaced: its
plan, its reservations, its door, its messages and its opening are those of a run. The adversary sends models and
reads what its view lets it read. If the lower bound on ε that its success proves is above the ε that the ledger
reports, the mechanism or its accounting is broken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modicum.aggregation.mean import Mean
from modicum.attacks.bounds import FloatArray, LowerBounds, lower_bounds
from modicum.attacks.probe import ProbeBackend, ProbeTraining
from modicum.core.door import DoorWatch
from modicum.core.messages import Broadcast, Decision, Message, Noised, ReleasedSum
from modicum.core.parts import (
    Backend,
    Batch,
    ClientFacts,
    ClientKit,
    Mechanism,
    Method,
    Observation,
    Opening,
    Policy,
    PublicFacts,
)
from modicum.errors import UserError
from modicum.federation.clients import Client, Clients
from modicum.federation.cohort import SecretPoisson
from modicum.federation.server import TrustedLedger
from modicum.federation.setup import kinds_of, multipliers_of
from modicum.policies.fixed import Fixed
from modicum.privacy.accounting.choose import shown
from modicum.privacy.budgets import Refusal
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.views import Adjacency, SecureAggregation, Shows, Unit

CONFIDENCE = 1 - 1e-6


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What to run. Each trial uses up one whole plan: `rounds` rounds, all that a client's budget allows."""

    mechanism: Mechanism
    budget: float = 2.0
    rounds: int = 1
    trials: int = 500  # in each of the two worlds
    records: int = 8  # of a client, the canary among them (record level)
    cohort: int = 3  # clients of a sum, the canary among them (client level)
    policy: Policy = field(default_factory=Fixed)
    layer: int = 0  # in which of the probe's two layers the canary lies
    dimension: int = 4
    seed: int = 0
    confidence: float = CONFIDENCE
    claimed: float | None = None  # ε to hold the mechanism to; None: what the ledger reports


@dataclass(frozen=True)
class Verdict:
    """Claimed ε beside what the audit proved."""

    claimed: float
    proved: LowerBounds
    gaussian: bool  # the claim is GDP, so that the tighter bound applies

    @property
    def epsilon(self) -> float:
        return self.proved.epsilon_from_mu if self.gaussian else self.proved.epsilon

    @property
    def broken(self) -> bool:
        return self.epsilon > self.claimed

    def sentence(self) -> str:
        verdict = "BROKEN: more than claimed" if self.broken else "within the claim"
        claimed = shown(self.claimed, 3)
        return f"ε ≥ {self.epsilon:.3g} proved at {self.proved.confidence:.6%}, claimed {claimed}: {verdict}"


def audit(
    what: Audit,
    *,
    noise: NoiseSource | None = None,
    watch: DoorWatch | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Run both worlds. The keyword arguments put another part in place, for instance a broken one."""
    source = noise or SimulatedNoise(what.seed)
    frame_backend = backend or ProbeBackend(what.dimension)
    worlds = []
    for present in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            stage = _Stage(what, present, Path(folder), source, frame_backend, watch)
            worlds.append((stage.scores(), stage.claimed))
            stage.ledger.close()
    (yes, claimed), (no, _) = worlds
    delta = what.mechanism.spec.delta
    proved = lower_bounds(yes, no, delta, what.confidence)
    return Verdict(what.claimed if what.claimed is not None else claimed, proved, _is_gaussian(what))


def _is_gaussian(what: Audit) -> bool:
    facts = ClientFacts("x", what.records, what.budget, what.rounds)
    releases = what.mechanism.plan(facts, ()).releases
    return bool(releases) and all(r.sampler.to_dict()["kind"] == "none" for r in releases)


class _Stage:
    """All trials of one world: their clients in one ledger, and the adversary's scores."""

    def __init__(
        self,
        what: Audit,
        present: bool,
        folder: Path,
        noise: NoiseSource,
        backend: Backend,
        watch: DoorWatch | None,
    ) -> None:
        self.what, self.present, self.noise = what, present, noise
        self.dimension = backend.layout.dimension
        size = backend.layout.sizes[0]
        self.direction = torch.zeros(self.dimension, dtype=torch.float64)
        self.direction[0 if what.layer == 0 else size] = 1.0
        members = self._members()
        facts = tuple(m.facts for m in members)
        kinds = kinds_of(what.mechanism, facts)
        noise_of = multipliers_of(what.mechanism, {m.facts.name: m.plan for m in members})
        public = PublicFacts(facts, what.rounds, self.dimension, noise_of, False, None, *kinds)
        shared = torch.ones(self.dimension, dtype=torch.bool)
        self.kit = ClientKit(backend, ProbeTraining(), what.policy, shared, public=public)
        self.adapts = bool(kinds[0] or what.policy.signals)
        # Each trial is a run of its own, whose policy sees that run alone.
        self.states = {
            f.name: what.policy.init(replace(public, clients=(f,), stock={f.name: kinds[1].get(f.name, ())}))
            for f in facts
        }
        self.ledger = Ledger.create(folder / "ledger.sqlite", "audit", noise)
        self.ledger.declare(c.plan for c in members)
        self.claimed = self.ledger.reported(members[0].facts.name)
        method = Method(
            name="audit",
            training=ProbeTraining(),
            policy=what.policy,
            mechanism=what.mechanism,
            aggregation=Mean(),
        )
        self.clients = Clients(method, self.kit, members, self.ledger, noise, at_once=len(members), watch=watch)
        self.trusted = TrustedLedger(self.ledger, noise, watch)

    @property
    def _of_a_trial(self) -> int:
        return 1 if self.what.mechanism.individuals else self.what.cohort

    def _names(self, trial: int) -> list[str]:
        world = "with" if self.present else "without"
        return [f"{world}-{trial}-{i}" for i in range(self._of_a_trial)]

    def _members(self) -> list[Client]:
        what, nothing = self.what, Batch(torch.zeros(0, self.dimension, dtype=torch.float64), {})
        batches = [self._records(canary=i == 0) for i in range(self._of_a_trial)]
        records = what.records if what.mechanism.spec.unit is Unit.RECORD else 1
        plan_of = what.mechanism.plan
        clients = []
        for trial in range(what.trials):
            for name, batch in zip(self._names(trial), batches, strict=True):
                facts = ClientFacts(name, records, what.budget, what.rounds)
                clients.append(Client(facts, plan_of(facts, ()), batch, nothing))
        return clients

    def _records(self, *, canary: bool) -> Batch:
        """The canary lies along the direction with a gradient far above the bound; its neighbour by adjacency."""
        adjacency, unit = self.what.mechanism.spec.adjacency, self.what.mechanism.spec.unit
        absent = 1.0 - adjacency.moves
        planted = (1.0 if self.present else absent) * 1e3 * self.direction
        if unit is Unit.CLIENT:
            return _batch([planted if canary else 0 * planted])
        others = [1e3 * torch.roll(self.direction, 1)] * (self.what.records - 1)
        gone = adjacency is Adjacency.ADD_REMOVE and not self.present
        return _batch(others if gone else [planted, *others])

    def scores(self) -> FloatArray:
        """Σ over rounds of what is seen along the canary, over its variance; the model's sign alternates, and the
        score's with it."""
        total = np.zeros(self.what.trials)
        for round in range(self.what.rounds):
            sign = 1.0 if round % 2 == 0 else -1.0
            model = torch.full((self.dimension,), sign, dtype=torch.float64)
            seen = self._round(round, model)
            # A step goes against the gradient.
            total += np.array([-sign * weight * float(update @ self.direction) for update, weight in seen])
        return total

    def _round(self, round: int, model: Tensor) -> list[tuple[Tensor, float]]:
        """What is seen of each trial, and how much it weighs."""
        cohorts = [self._names(trial) for trial in range(self.what.trials)]
        view = self.what.mechanism.spec.view
        if view.shows is Shows.MODEL:
            return [(seen, 1.0) for seen in self._opened_by_servers(round, cohorts, model)]
        broadcasts = [self._broadcast(round, name, model) for names in cohorts for name in names]
        messages = self._ask(broadcasts)
        if view.shows is Shows.SUM:
            return [(self._sum_of_shares(round, [messages[n] for n in names], model), 1.0) for names in cohorts]
        if not self.adapts:
            return [(messages[b.client].update, 1.0) for b in broadcasts]
        left, stock = self.ledger.left(), self.ledger.stock()
        return [self._observed(b, messages[b.client], left, stock) for b in broadcasts]

    def _observed(
        self, broadcast: Broadcast, message: Message, left: dict[str, float], stock: dict[str, tuple[float, ...]]
    ) -> tuple[Tensor, float]:
        """One client's message, which its trial's policy sees; the adversary weighs it by its noise."""
        assert isinstance(message, Noised)
        facts, name = self.what.mechanism.expected(*self._agreed(broadcast)).facts, broadcast.client
        observed = Observation(
            broadcast.round,
            (message.known(facts),),
            {name: broadcast.decision},
            left={name: left[name]},
            stock={name: stock[name]},
        )
        self.states[name] = self.what.policy.observe(self.states[name], observed)
        return message.update, 1 / facts.variance if facts.variance else 1.0

    def _agreed(self, broadcast: Broadcast) -> tuple[ClientFacts, PrivacyPlan, ClientKit, Broadcast, int]:
        client = self.clients.clients[broadcast.client]
        return client.facts, client.plan, self.kit, broadcast, broadcast.round

    def _broadcast(self, round: int, name: str, model: Tensor) -> Broadcast:
        chosen: dict[str, Decision] = self.what.policy.decide(self.states[name], round, [name])
        return Broadcast("audit", round, name, chosen[name], model)

    def _ask(self, broadcasts: Sequence[Broadcast]) -> dict[str, Message]:
        messages: dict[str, Message] = {}
        for name, answer in self.clients.answer(broadcasts).items():
            if isinstance(answer, Refusal):
                raise UserError(
                    f"the audit's client {name!r} refused: give it a budget for {self.what.rounds} rounds"
                )
            messages[name] = answer
        return messages

    def _opening(self, round: int, names: Sequence[str], model: Tensor) -> Opening:
        events = {n: self.clients.events(self._broadcast(round, n, model)) for n in names}
        return Opening(round, tuple(names), events, model, denominator=1.0)

    def _sum_of_shares(self, round: int, shares: Sequence[Message], model: Tensor) -> Tensor:
        """The last clients of the cohort collude, so their shares are taken out; those before them drop out."""
        view = self.what.mechanism.spec.view
        assert isinstance(view, SecureAggregation)
        context = self._opening(round, [m.client for m in shares], model)
        colluding = shares[view.noise_shares + view.dropouts :]
        opened = self.what.mechanism.open([*shares[: view.noise_shares], *colluding], context)
        assert isinstance(opened, ReleasedSum)
        known = [m.update for m in colluding]
        return opened.update - torch.stack(known).sum(0) if known else opened.update

    def _opened_by_servers(self, round: int, cohorts: Sequence[list[str]], model: Tensor) -> list[Tensor]:
        """A server's noise and its secret cohort are keyed by the round, so each trial has rounds of its own."""
        first = 0 if self.present else self.what.rounds * self.what.trials
        at = [first + trial * self.what.rounds + round for trial in range(len(cohorts))]
        asked = [
            self._broadcast(t, name, model)
            for t, names in zip(at, cohorts, strict=True)
            for name in self._drawn(t, names)
        ]
        messages = self._ask(asked)
        openings = [self._opening(t, names, model) for t, names in zip(at, cohorts, strict=True)]
        tokens = iter(self.trusted.reserve({n: es for o in openings for n, es in o.events.items()}))
        seen = []
        for opening in openings:
            own = [next(tokens) for es in opening.events.values() for _ in es]
            answers = [messages[n] for n in opening.invited if n in messages]
            opened = self.what.mechanism.open(answers, replace(opening, door=self.trusted.door(own)))
            assert isinstance(opened, ReleasedSum)
            seen.append(opened.update)
        return seen

    def _drawn(self, round: int, names: Sequence[str]) -> list[str]:
        rate = self.what.mechanism.cohort_rate
        if rate is None:
            return list(names)
        return [names[i] for i in SecretPoisson(len(names), round + 1, rate, self.noise).invited(round)]


def _batch(rows: Sequence[Tensor]) -> Batch:
    return Batch(torch.stack(list(rows)), {"y": torch.zeros(len(rows), dtype=torch.long)})
