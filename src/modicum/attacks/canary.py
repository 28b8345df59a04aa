"""Canary audit: plant one unit, run the real code many times with and without it, and try to tell which it was.

A trial is one client (or one cohort) with its own plan in a real ledger. Nothing of a run is replaced: its loop,
plan, reservations, gate, messages and opening are those of any other. The adversary is the server: it chooses the
models that it sends (`Turning`) and reads what its view lets it read (`TrialCarrier`). If the lower bound on ε
that its success proves is above the ε that the ledger reports, the mechanism or its accounting is broken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from scipy.linalg import toeplitz
from torch import Tensor

from modicum.attacks.bounds import FloatArray, LowerBounds, lower_bounds
from modicum.attacks.probe import ProbeBackend, ProbeTraining, Turning
from modicum.attacks.trials import EachTrial, TrialCarrier, TrialCohorts, TrialNoise
from modicum.core import release_gate
from modicum.core.extension_points import secret_rate
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.parts import Backend, Batch, ClientKit, Mechanism, Method, Policy
from modicum.core.persons import Slot
from modicum.core.release_gate import GateWatch
from modicum.data import persons
from modicum.data.arrays import Arrays
from modicum.errors import UserError
from modicum.federation.clients import Client, Clients
from modicum.federation.correlate import Correlates
from modicum.federation.rounds import Rounds
from modicum.federation.server import Server
from modicum.federation.setup import frozen_multipliers, kinds_of
from modicum.mechanisms.record_local import RecordLocal
from modicum.policies.fixed import Fixed
from modicum.privacy.accounting.choose import shown
from modicum.privacy.correlated import Correlated
from modicum.privacy.events import Cyclic, NoSampling
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.privacy.noise.correlated import CorrelatedSteps
from modicum.privacy.views import Adjacency, Unit

RUN = "audit"
CONFIDENCE = 1 - 1e-6
SLOT = Slot(2)  # of the persons of an audit


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What to run. Each trial uses up one whole plan: `rounds` rounds, all that a client's budget allows."""

    mechanism: Mechanism
    budget: float = 2.0
    rounds: int = 1
    trials: int = 500  # in each of the two worlds
    records: int = 8  # of a client, the canary among them (record level)
    cohort: int = 3  # clients of a sum, the canary among them; where noise is correlated, they come in turn
    policy: Policy = field(default_factory=Fixed)
    layer: int | None = 0  # in which of the probe's tensors the canary lies; None: in all of them alike
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
        """The largest ε that the audit proved to be exceeded, at its confidence."""
        return self.proved.epsilon_from_mu if self.gaussian else self.proved.epsilon

    @property
    def broken(self) -> bool:
        """Whether more was proved than is claimed."""
        return self.epsilon > self.claimed

    def sentence(self) -> str:
        """Both figures and the verdict in one line."""
        verdict = "BROKEN: more than claimed" if self.broken else "within the claim"
        claimed = shown(self.claimed, 3)
        return f"ε ≥ {self.epsilon:.3g} proved at {self.proved.confidence:.6%}, claimed {claimed}: {verdict}"


def audit(
    what: Audit,
    *,
    noise: NoiseSource | None = None,
    watch: GateWatch | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Run both worlds. The keyword arguments put another part in place, for instance a broken one."""
    source = noise or SimulatedNoise(what.seed)
    backend = backend or ProbeBackend(what.dimension)
    worlds = []
    for present in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            world = _World(what, present, Path(folder), source, backend, watch)
            worlds.append((world.scores(), world.claimed))
            world.ledger.close()
    (yes, claimed), (no, _) = worlds
    delta = what.mechanism.spec.delta
    proved = lower_bounds(yes, no, delta, what.confidence)
    return Verdict(what.claimed if what.claimed is not None else claimed, proved, _is_gaussian(what))


def _schedule(what: Audit) -> Correlated | None:
    """Of noise that is correlated over rounds."""
    return what.mechanism.correlated if isinstance(what.mechanism, Correlates) else None


def _own_steps(what: Audit) -> tuple[Correlated, FloatArray] | None:
    """Of noise that a client correlates over its steps, one a round: and in which of them the canary is."""
    mechanism = what.mechanism
    if not isinstance(mechanism, RecordLocal) or not isinstance(mechanism.schedule, CorrelatedSteps):
        return None
    releases = mechanism.releases_of(ClientFacts("x", what.records, what.budget, what.rounds))
    schedule = mechanism.schedule.rows(releases)
    if schedule is None or not isinstance(releases.sampler, Cyclic):
        return None
    turns = [release_gate.batch_of(t, releases.sampler, what.records) for t in range(what.rounds)]
    return schedule, np.array([float(0 in batch) for batch in turns])


def _participations(what: Audit) -> int:
    """Rounds that a client of a trial is in: all of them, or every so many where they come in turn."""
    return what.rounds if _schedule(what) is None else -(-what.rounds // what.cohort)


def _weights(what: Audit) -> FloatArray:
    """How much each round's release counts in the score: the best there is for a canary of this pattern.

    The model's sign alternates, and the canary's with it. Of y = x + C⁻¹z the best test is (C·x)·(C·y).
    """
    planted = np.resize([1.0, -1.0], what.rounds)
    schedule, own = _schedule(what), _own_steps(what)
    if own is not None:
        schedule, taking_part = own
        planted *= taking_part
    elif schedule is not None:
        planted[np.arange(what.rounds) % what.cohort != 0] = 0.0
    if schedule is None:
        return planted
    whole = np.tril(toeplitz(schedule.factor.column(what.rounds)))
    return np.asarray(whole.T @ whole @ planted)


def _is_gaussian(what: Audit) -> bool:
    facts = ClientFacts("x", what.records, what.budget, _participations(what))
    releases = what.mechanism.plan(facts, ()).releases
    return bool(releases) and all(isinstance(r.sampler, NoSampling | Cyclic) for r in releases)


class _World:
    """All trials of one world: their clients in one ledger, played by the one loop, and the adversary's scores."""

    def __init__(
        self,
        what: Audit,
        present: bool,
        folder: Path,
        noise: NoiseSource,
        backend: Backend,
        watch: GateWatch | None,
    ) -> None:
        self.what, self.present, self.dimension = what, present, backend.layout.dimension
        self.direction = torch.zeros(self.dimension, dtype=torch.float64)
        firsts = [where.start for where in backend.layout.slices().values()]
        self.direction[firsts if what.layer is None else firsts[what.layer]] = 1.0
        self.direction /= self.direction.norm()
        members = self._members()
        self.ledger = Ledger.create(folder / "ledger.sqlite", RUN, noise)
        self.ledger.declare(c.plan for c in members)
        self.claimed = self.ledger.reported(members[0].facts.name)
        method = Method(
            name=RUN, training=ProbeTraining(), policy=what.policy, mechanism=what.mechanism, aggregation=Turning()
        )
        multipliers = frozen_multipliers({c.facts.name: c.plan for c in members}, what.mechanism.purpose)
        facts = tuple(c.facts for c in members)
        scales, stock = kinds_of(what.mechanism, facts)
        public = PublicFacts(facts, what.rounds, self.dimension, multipliers, scales=scales, stock=stock)
        shared = torch.ones(self.dimension, dtype=torch.bool)
        kit = ClientKit(backend, method.training, method.policy, shared, public=public)
        own = [self._noise_of(trial, noise) for trial in range(what.trials)]
        in_turn = _schedule(what) is not None
        cohorts = TrialCohorts(self._of_a_trial, what.rounds, tuple(own), secret_rate(what.mechanism), in_turn)
        first = torch.ones(self.dimension, dtype=torch.float64)
        self.server = Server(method, public, cohorts, RUN, kit, first)
        clients = Clients(method, kit, members, self.ledger, noise, at_once=len(members), watch=watch)
        names = [self._names(trial) for trial in range(what.trials)]
        self.carrier = TrialCarrier(self.server, clients, self.ledger, names, own, noise, watch)

    @property
    def _of_a_trial(self) -> int:
        return 1 if self.what.mechanism.individuals else self.what.cohort

    def _names(self, trial: int) -> list[str]:
        world = "with" if self.present else "without"
        return [f"{world}-{trial}-{i}" for i in range(self._of_a_trial)]

    def _noise_of(self, trial: int, noise: NoiseSource) -> TrialNoise:
        at = trial if self.present else self.what.trials + trial
        return TrialNoise(noise, at * self.what.rounds)

    def _members(self) -> list[Client]:
        what, nothing = self.what, Batch(torch.zeros(0, self.dimension, dtype=torch.float64), {})
        batches = [self._records(canary=i == 0) for i in range(self._of_a_trial)]
        records = what.records if what.mechanism.spec.unit.of_client else 1
        plan_of = what.mechanism.plan
        clients = []
        for trial in range(what.trials):
            for name, batch in zip(self._names(trial), batches, strict=True):
                facts = ClientFacts(name, records, what.budget, _participations(what))
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
        if unit is Unit.PERSON:
            return _persons([planted, *others])
        gone = adjacency is Adjacency.ADD_REMOVE and not self.present
        return _batch(others if gone else [planted, *others])

    def scores(self) -> FloatArray:
        """Σ over rounds of what is seen along the canary, weighted as is best for its pattern."""
        total, begun = np.zeros(self.what.trials), self.server.state.policy
        for weight, _ in zip(_weights(self.what), Rounds(self.server, self.carrier), strict=True):
            # A step goes against the gradient.
            total += np.array([-weight * float(update @ self.direction) for update in self.carrier.seen])
        if not isinstance(self.what.policy, EachTrial) and self.server.state.policy != begun:
            raise UserError("the audit's policy learns from releases, so that its trials are not independent")
        return total


def _persons(people: Sequence[Tensor]) -> Batch:
    """Each with as many rows as a slot has, but for the canary, who has two slots' more, all over the table."""
    table = [*range(len(people)), *(0 for _ in range(2 * SLOT.rows)), *list(range(len(people))) * (SLOT.rows - 1)]
    x = torch.stack([people[who] for who in table]).numpy()
    held = persons.grouped(Arrays(x, np.zeros(len(table), np.int64)), np.array(table), SLOT)
    return Batch(torch.from_numpy(held.x).double(), {"y": torch.from_numpy(held.y)})


def _batch(rows: Sequence[Tensor]) -> Batch:
    return Batch(torch.stack(list(rows)), {"y": torch.zeros(len(rows), dtype=torch.long)})
