"""A method played through in memory, without ledger or files: for public simulation and for benchmarks.

Same parts, same events, same law of the noise as `Simulation`; nothing is durable, so it serves no deployment. All
clients of a round are computed at once, and noise is drawn where the model lives.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.core.door import SERVER
from modicum.core.messages import Broadcast, Expected, Message, ReleasedSum
from modicum.core.parts import Batch, Frame, Job, Opening, PublicFacts, State
from modicum.engines.choose import choose
from modicum.federation.evaluation import accuracy_by_client, evaluate, own_model
from modicum.federation.experiment import Experiment, Prepared, prepare
from modicum.federation.server import Proposal, Server
from modicum.federation.simulation import make_cohorts, make_facts, make_plans
from modicum.mechanisms.common import training_multiplier
from modicum.privacy.events import Poisson, Release
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.token import Token
from modicum.privacy.views import KnownTo


@dataclass(frozen=True)
class RehearsedNoise:
    """A door without a ledger: noise of each release from its own seed, on the tensor's own device."""

    seed: int

    @property
    def tokens(self) -> tuple[Token, ...]:
        return ()

    def reserve(self, release: Release) -> bool:  # noqa: ARG002
        return True

    def sample(self, release: Release, step: int, records: int) -> Tensor:
        if not isinstance(release.sampler, Poisson) or release.sampler.known_to is not KnownTo.CLIENT:
            return torch.arange(records)
        seed = counter_seed(self.seed, release.client, release.round, step, "coins")
        coins = torch.rand(records, generator=torch.Generator().manual_seed(seed))
        return torch.nonzero(coins < release.sampler.rate).flatten()

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stds = {block.name: block.noise_std for block in release.blocks}
        return {
            name: self._noised(value, stds[name], release.client, release.round, step, name)
            for name, value in sums.items()
        }

    def release_sum(
        self, events: Mapping[str, tuple[Release, ...]], round: int, sums: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        blocks = [block for es in events.values() for e in es for block in e.blocks]
        stds = {name: max(b.noise_std for b in blocks if b.name == name) for name in sums}
        return {name: self._noised(value, stds[name], SERVER, round, 0, name) for name, value in sums.items()}

    def _noised(self, value: Tensor, std: float, *key: object) -> Tensor:
        if not std:
            return value
        generator = torch.Generator(value.device).manual_seed(counter_seed(self.seed, *key))
        return torch.empty_like(value).normal_(0.0, std, generator=generator).add_(value)


def counter_seed(*key: object) -> int:
    """A seed for torch's generators that is a function of a key, never of what was drawn before."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8, person=b"modicum.seeds").digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Rehearsed:
    """One round. `simulated` is ground truth that only a simulator can see."""

    round: int
    bound: float
    norm: float  # of the released mean update, noise included
    public: Mapping[str, float]
    simulated: Mapping[str, float] = field(default_factory=dict)


class Rehearsal:
    """Plays an experiment round by round. `prepared` may be shared by runs on the same data and model."""

    def __init__(self, experiment: Experiment, prepared: Prepared | None = None) -> None:
        self.experiment = experiment
        self.method = experiment.method.build(experiment.setting)
        self.data = prepared or prepare(experiment, self.method)
        self.backend = choose(self.data.model, self.data.first.device).backend
        noise = SimulatedNoise(experiment.seed)
        cohorts = make_cohorts(experiment, self.method.mechanism, noise)
        self.facts = {f.name: f for f in make_facts(experiment, cohorts)}
        self.plans = make_plans(experiment, self.method.mechanism, tuple(self.facts.values()), cohorts)
        shared = self.backend.layout.where(self.method.wrapper.shared).to(self.data.first.device)
        multipliers = {n: training_multiplier(p, self.method.mechanism.purpose) for n, p in self.plans.items()}
        facts, features = tuple(self.facts.values()), self.data.features
        public = PublicFacts(facts, experiment.rounds, int(shared.sum()), multipliers, features=features)
        self.frame = Frame(
            self.backend, self.method.training, self.method.policy, shared, experiment.metrics, public
        )
        first = self.data.first[shared]
        limits = experiment.average, experiment.bounds
        self.server = Server(self.method, public, cohorts, "rehearsal", self.frame, first, *limits)
        self.door = RehearsedNoise(experiment.seed)
        personal = self.data.first[~shared]
        self.states: dict[str, State] = {n: {"personal": personal} if len(personal) else {} for n in self.facts}
        self._turns = dict.fromkeys(self.facts, 0)
        self._records = dict(zip(self.facts, self.data.records, strict=True))
        self._validation = dict(zip(self.facts, self.data.validation, strict=True))

    def rounds(self) -> Iterator[Rehearsed]:
        while not self.server.finished:
            yield self.step()

    def step(self) -> Rehearsed:
        proposal, jobs = self.begin()
        results = self.method.mechanism.run(jobs, self.frame) if jobs else []
        return self.finish(proposal, jobs, results)

    def begin(self) -> tuple[Proposal, list[Job]]:
        """What the server proposes, and what each client is asked for."""
        proposal = self.server.propose()
        return proposal, [self._job(b) for b in proposal.broadcasts]

    def finish(
        self, proposal: Proposal, jobs: Sequence[Job], results: Sequence[tuple[Message, State]]
    ) -> Rehearsed:
        """The server's half of a round that `begin` began, with what the mechanism made of the jobs."""
        server, messages = self.server, []
        for job, (message, state) in zip(jobs, results, strict=True):
            self.states[job.facts.name] = state
            self._turns[job.facts.name] += 1
            messages.append(message)
        opened = self.method.mechanism.open(messages, self._opening(proposal))
        before = server.state.model
        server.advance(opened, {})
        public = {} if self.data.proxy is None else evaluate(self.backend, self.model, self.data.proxy)
        server.observe(proposal, opened, public)
        moved = opened.update if isinstance(opened, ReleasedSum) else server.state.model - before
        bounds = [d.bound for d in proposal.decisions.values()]
        return Rehearsed(
            proposal.round, statistics.median(bounds), moved.norm().item(), public, self._evaluate(proposal.round)
        )

    def _opening(self, proposal: Proposal) -> Opening:
        secret = self.method.mechanism.cohort_rate is not None  # everyone is charged, drawn or not (R5)
        charged = self.server.broadcasts_to_all(proposal) if secret else proposal.broadcasts
        events = {b.client: self._events(b) for b in charged}
        expected = {b.client: self._expected(b) for b in proposal.broadcasts}
        size = self.server.cohorts.size
        return Opening(proposal.round, proposal.cohort, events, self.server.state.model, size, self.door, expected)

    def _expected(self, b: Broadcast) -> Expected:
        facts, plan = self.facts[b.client], self.plans[b.client]
        return self.method.mechanism.expected(facts, plan, self.frame, b, self._turns[b.client])

    def _events(self, b: Broadcast) -> tuple[Release, ...]:
        name = b.client
        return self.method.mechanism.events(self.facts[name], self.plans[name], self.frame, b, self._turns[name])

    def _job(self, b: Broadcast) -> Job:
        name = b.client
        return Job(
            facts=self.facts[name],
            plan=self.plans[name],
            records=self._records[name],
            validation=self._validation[name],
            state=self.states[name],
            broadcast=b,
            participation=self._turns[name],
            seed=counter_seed(self.experiment.seed, name, b.round),
            door=self.door,
        )

    @property
    def model(self) -> Tensor:
        """The whole parameter vector: what the server has, and the initial values of personal parameters."""
        return self.server.whole(self.data.first)

    def accuracies(self, held_out: tuple[Batch, ...]) -> dict[str, float]:
        """Each client's own model, personalised or not, on held-out records of its own."""
        model = self.model
        models = {name: own_model(model, self.frame.shared, state) for name, state in self.states.items()}
        return accuracy_by_client(self.backend, models, held_out)

    def _evaluate(self, round: int) -> dict[str, float]:
        if not self.server.finished and (round + 1) % self.experiment.evaluate_every:
            return {}
        found = {}
        if len(self.data.test):
            found = {f"test_{k}": v for k, v in evaluate(self.backend, self.model, self.data.test).items()}
        for name, held_out in (("personalised", self.data.client_test), ("validation", self.data.validation)):
            if own := self.accuracies(held_out):
                found[f"{name}_accuracy"] = statistics.fmean(own.values())
        return found


def rehearse(experiment: Experiment, prepared: Prepared | None = None) -> tuple[Rehearsed, ...]:
    """All rounds of an experiment."""
    return tuple(Rehearsal(experiment, prepared).rounds())
