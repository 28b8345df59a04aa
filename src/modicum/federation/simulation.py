"""All clients of an experiment in one process: the round of the design, from proposal to checkpoint."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from modicum.core.door import SERVER, DoorWatch
from modicum.core.memory import keep_pages
from modicum.core.messages import Broadcast, Opened, Released, ReleasedSum, encode, paid
from modicum.core.parts import Backend, ClientFacts, Frame, Mechanism, PublicFacts
from modicum.core.store import load_state, save_state
from modicum.engines.choose import choose
from modicum.errors import UserError
from modicum.federation.clients import Client, Clients
from modicum.federation.cohort import Balanced, Cohorts, RandomCohorts, SecretPoisson, rounds_of
from modicum.federation.evaluation import accuracy_by_client, evaluate, own_model
from modicum.federation.experiment import Experiment, prepare
from modicum.federation.foreign import foreign_parts
from modicum.federation.identity import records_id, run_id
from modicum.federation.records import MetricsFile, RoundRecord
from modicum.federation.run_folder import RunFolder
from modicum.federation.server import OpenedOnce, Proposal, Server, TrustedLedger
from modicum.federation.transcript import AGGREGATOR, Forget, Kind, Seen, Transcript
from modicum.mechanisms.common import metric_plans, training_multiplier
from modicum.privacy.budgets import Reason, Refusal, Refused
from modicum.privacy.events import Release
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.token import Token
from modicum.privacy.views import Shows

OWN_FAULT = frozenset({Reason.BAD_MODEL, Reason.BAD_BOUND})
"""Refusals of a proposal as such: the server's own doing, for which no client retires."""

Faults = Callable[[int, str], bool]
"""(round, client) → True where the client never answers; for tests and what-if experiments."""


@dataclass(frozen=True)
class Exchange:
    """What came of asking a round's cohort."""

    opened: Opened | None
    answered: int
    refused: Mapping[str, str]  # who retires, and why
    impossible: Mapping[str, str] = field(default_factory=dict)


class Simulation:
    """Runs an experiment in a folder, one durable round at a time. Opening the same folder again resumes it."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        noise: NoiseSource | None = None,
        faults: Faults | None = None,
        transcript: Transcript | None = None,
        watch: DoorWatch | None = None,
    ) -> None:
        self.experiment, self.folder = experiment, folder
        self.noise = noise or SimulatedNoise(experiment.seed)
        self._faults = faults or (lambda round, client: False)  # noqa: ARG005
        self.transcript: Transcript = transcript or Forget()
        self.method = experiment.method.build(experiment.setting)
        self.data = prepare(experiment, self.method)
        if experiment.device == "cpu":
            keep_pages()
        engine = choose(self.data.model, experiment.device)
        self.backend: Backend = engine.backend
        self.cohorts = make_cohorts(experiment, self.method.mechanism, self.noise)
        shared = self.backend.layout.where(self.method.wrapper.shared).to(self.data.first.device)
        self.facts = make_facts(experiment, self.cohorts)
        self.plans = make_plans(experiment, self.method.mechanism, self.facts, self.cohorts)
        public = self._public(int(shared.sum()))
        self.frame = Frame(
            self.backend, self.method.training, self.method.policy, shared, experiment.metrics, public
        )
        files = RunFolder(folder)
        foreign = foreign_parts(experiment.method, self.method, experiment.model, self.data.model)
        self.ledger = files.open_ledger(run_id(experiment), self.noise, records_id(experiment), foreign)
        self.ledger.declare(self.plans.values())
        first, run = self.data.first[shared], self.ledger.run_id
        limits = experiment.average, experiment.bounds
        self.server = Server(self.method, public, self.cohorts, run, self.frame, first, *limits)
        self.clients = Clients(
            self.method,
            self.frame,
            self._clients(),
            self.ledger,
            self.noise,
            files.clients,
            engine.at_once,
            watch=watch,
        )
        self.trusted = TrustedLedger(self.ledger, self.noise, watch) if self._central else None
        self._checkpoint, self._once = files.checkpoint, OpenedOnce(files.opened)
        if self._checkpoint.exists():
            self.server.restore(load_state(self._checkpoint))
        self.metrics = MetricsFile(files.metrics, self.server.state.round)

    @property
    def _central(self) -> bool:
        return not self.method.mechanism.spec.view.senders_add_noise

    def _public(self, dimension: int) -> PublicFacts:
        purpose = self.method.mechanism.purpose
        multipliers = {name: training_multiplier(plan, purpose) for name, plan in self.plans.items()}
        adaptive = any(plan.guard in (Guard.GDP_FILTER, Guard.RDP_FILTER) for plan in self.plans.values())
        features = self.data.features
        return PublicFacts(
            self.facts, self.experiment.rounds, dimension, {} if adaptive else multipliers, adaptive, features
        )

    def _clients(self) -> list[Client]:
        personal = self.data.first[~self.frame.shared]
        return [
            Client(
                facts, self.plans[facts.name], records, validation, {"personal": personal} if len(personal) else {}
            )
            for facts, records, validation in zip(self.facts, self.data.records, self.data.validation, strict=True)
        ]

    def close(self) -> None:
        self.ledger.close()

    def rounds(self) -> Iterator[RoundRecord]:
        """Run what is left, round by round."""
        while not self.server.finished:
            yield self.step()

    def step(self) -> RoundRecord:
        """One round: propose, reserve, compute, settle, open, aggregate, observe, checkpoint."""
        server, proposal = self.server, self.server.propose()
        trusted = self.trusted
        done = self._exchange(proposal) if trusted is None else self._exchange_trusted(proposal, trusted)
        opened, refused = done.opened, done.refused
        for release in (opened,) if isinstance(opened, ReleasedSum) else opened or ():
            self._note(SERVER, proposal.round, "opened", SERVER, release)
        moved = server.advance(opened, {n: why for n, why in refused.items() if why not in OWN_FAULT})
        public = self._evaluate_public()
        server.observe(proposal, opened, public)
        secret = self.method.mechanism.cohort_rate is not None  # who was drawn, and how many, stays untold (R5)
        record = RoundRecord(
            round=proposal.round,
            bounds={name: d.bound for name, d in proposal.decisions.items() if secret or name in proposal.asked},
            answered=None if secret else done.answered,
            refused=refused,
            abandoned=not moved,
            reserved=self.ledger.share_made(),
            public=public,
            paid=paid(opened),
            simulated=self._evaluate(proposal.round),
            impossible={} if secret else done.impossible,
        )
        self.metrics.append(record)
        save_state(self._checkpoint, server.state.to_dict())
        self.clients.acknowledge(server.state.round)
        return record

    def _exchange(self, proposal: Proposal) -> Exchange:
        blobs, refused = self._ask(proposal.broadcasts)
        events = {b.client: self.clients.events(b) for b in proposal.broadcasts if b.client in blobs}
        expected = {b.client: self.clients.expected(b) for b in proposal.broadcasts if b.client in blobs}
        answers = self.server.read(proposal, blobs, expected)
        opened = self._once.open(
            proposal.round,
            self.data.first.device,
            lambda: self.server.open(proposal, answers.messages, events, expected) if blobs else None,
        )
        return Exchange(opened, len(answers.messages), refused, answers.impossible)

    def _ask(self, broadcasts: Sequence[Broadcast]) -> tuple[dict[str, bytes], dict[str, str]]:
        """Carry proposals to clients and their answers back, noting what each side sees."""
        reached = [b for b in broadcasts if not self._faults(b.round, b.client)]
        for b in reached:
            self._note(b.client, b.round, "broadcast", SERVER, b)
        answers = self.clients.answer(reached)
        blobs = {name: a for name, a in answers.items() if isinstance(a, bytes)}
        refused = {name: str(a.reason) for name, a in answers.items() if isinstance(a, Refusal)}
        round = self.server.state.round
        # Shares are summed by secure aggregation, which shows the server their sum alone.
        sees = AGGREGATOR if self.method.mechanism.spec.view.shows is Shows.SUM else SERVER
        for name, blob in blobs.items():
            self.transcript.record(Seen(sees, round, "message", name, blob))
        for name, reason in refused.items():
            self.transcript.record(Seen(SERVER, round, "refusal", name, reason.encode()))
        return blobs, refused

    def _note(
        self, party: str, round: int, kind: Kind, sender: str, message: Broadcast | Released | ReleasedSum
    ) -> None:
        if not isinstance(self.transcript, Forget):
            self.transcript.record(Seen(party, round, kind, sender, encode(message)))

    def _exchange_trusted(self, proposal: Proposal, trusted: TrustedLedger) -> Exchange:
        events, tokens, refused = self._reserve_trusted(proposal, trusted)
        asked = [b for b in proposal.broadcasts if b.client not in refused]
        stored = trusted.stored(proposal.round)
        if stored is not None:
            return Exchange(stored, sum(not self._faults(b.round, b.client) for b in asked), refused)
        blobs, _ = self._ask(asked)
        if not tokens:  # nobody has budget left
            return Exchange(None, 0, refused)
        expected = {b.client: self.clients.expected(b) for b in asked}
        answers = self.server.read(proposal, blobs, expected)
        opened = self.server.open(proposal, answers.messages, events, expected, trusted.door(tokens))
        assert isinstance(opened, ReleasedSum)
        trusted.settle(tokens, opened)
        return Exchange(opened, len(answers.messages), refused, answers.impossible)

    def _reserve_trusted(
        self, proposal: Proposal, trusted: TrustedLedger
    ) -> tuple[dict[str, tuple[Release, ...]], list[Token], dict[str, str]]:
        """Charge everyone the sum may depend on; those without budget retire before anything is computed."""
        events, gone = self._charged(proposal), dict[str, str]()
        try:
            return events, trusted.reserve(events), gone
        except Refused as refused:
            gone = {r.client: str(r.reason) for r in refused.refusals}
        events = {name: es for name, es in events.items() if name not in gone}
        return events, trusted.reserve(events), gone

    def _charged(self, proposal: Proposal) -> dict[str, tuple[Release, ...]]:
        """With a secret cohort everyone is charged, drawn or not (R5); else those who were asked."""
        broadcasts = (
            self.server.broadcasts_to_all(proposal) if self.method.mechanism.cohort_rate else proposal.broadcasts
        )
        return {b.client: self.clients.events(b) for b in broadcasts}

    @property
    def model(self) -> Tensor:
        """The whole parameter vector: what the server has, and the initial values of personal parameters."""
        return self.server.whole(self.data.first)

    def _evaluate_public(self) -> dict[str, float]:
        return {} if self.data.proxy is None else evaluate(self.backend, self.model, self.data.proxy)

    @property
    def _sees_ground_truth(self) -> bool:
        """Only a run that protects nobody may look at test records: figures of them would be told for free."""
        return bool(self.noise.describe()["simulation"])

    def client_accuracies(self) -> dict[str, float]:
        """Simulated ground truth: each client's own model, personalised or not, on its own test records."""
        if not self._sees_ground_truth:
            return {}
        model, shared = self.model, self.frame.shared
        models = {name: own_model(model, shared, client.state) for name, client in self.clients.clients.items()}
        return accuracy_by_client(self.backend, models, self.data.client_test)

    def _evaluate(self, round: int) -> dict[str, float]:
        due = self.server.finished or (round + 1) % self.experiment.evaluate_every == 0
        if not due or not len(self.data.test) or not self._sees_ground_truth:
            return {}
        found = {f"test_{k}": v for k, v in evaluate(self.backend, self.model, self.data.test).items()}
        if any(client.state for client in self.clients.clients.values()) and (own := self.client_accuracies()):
            found["personalised_accuracy"] = statistics.fmean(own.values())
        return found


def make_cohorts(experiment: Experiment, mechanism: Mechanism, noise: NoiseSource) -> Cohorts:
    s = experiment.setting
    if mechanism.cohort_rate is not None:
        return SecretPoisson(s.clients, s.rounds, mechanism.cohort_rate, noise)
    if experiment.max_participations is not None:
        return RandomCohorts(s.clients, s.rounds, s.per_round, experiment.max_participations, experiment.seed)
    return Balanced(s.clients, s.rounds, s.per_round, experiment.seed)


def make_facts(experiment: Experiment, cohorts: Cohorts) -> tuple[ClientFacts, ...]:
    data, budgets = experiment.federation.data, experiment.federation.budgets
    return tuple(
        ClientFacts(name, size, budget, max(1, cohorts.participations(i)), len(data.clients[i].validation))
        for i, (name, size, budget) in enumerate(zip(data.names, data.sizes, budgets, strict=True))
    )


def make_plans(
    experiment: Experiment, mechanism: Mechanism, facts: tuple[ClientFacts, ...], cohorts: Cohorts
) -> dict[str, PrivacyPlan]:
    mechanism.spec.refuse_true_sizes()
    for facts_i, client in zip(facts, experiment.federation.data.clients, strict=True):
        if experiment.metrics and not len(client.validation):
            raise UserError(
                f"client {facts_i.name!r} has no validation records for the declared metrics: set validation"
            )
    return {
        f.name: mechanism.plan(
            f, metric_plans(mechanism.spec, experiment.metrics, rounds_of(cohorts, i, experiment.rounds))
        )
        for i, f in enumerate(facts)
    }
