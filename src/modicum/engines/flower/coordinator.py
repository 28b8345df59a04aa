"""The server of a deployed run: durable rounds over whatever carries requests to silos and answers back.

It knows what silos say of themselves and what they send, and nothing else. Killed at any moment, it continues the
same run: the invitation, the model, the policy's state and the record of what was asked are all on disk.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from modicum.config import Config, federation, to_toml
from modicum.core.messages import Broadcast, Expected, Message, Opened, encode, paid
from modicum.core.parts import ClientFacts, Frame
from modicum.core.store import load_state, save_state
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.data.geometry import load_geometry
from modicum.engines.flower.card import Card, Kinds
from modicum.engines.loop import LoopBackend
from modicum.errors import UserError
from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, Federation, prepare
from modicum.federation.features import is_file
from modicum.federation.foreign import foreign_parts
from modicum.federation.records import MetricsFile, RoundRecord, read_records
from modicum.federation.run_folder import RunFolder
from modicum.federation.server import OpenedOnce, Proposal, Server
from modicum.privacy.budgets import Refused
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Release
from modicum.privacy.plan import PrivacyPlan
from modicum.report.summary import Summary, groups, last
from modicum.report.write import write_report
from modicum.silo.terms import Join, Terms, adapts, digest
from modicum.silo.wire import TRANSIENT, Answer, Code, Kind

LOG = logging.getLogger("modicum.server")
INVITATION, KINDS = "invitation.json", "kinds.json"
OWN_FAULT = frozenset({Code.BAD_MODEL, Code.BOUND_OUT_OF_RANGE, Code.NOISE_TOO_SMALL, Code.MALFORMED})
"""Refusals of a proposal as such: the server's own doing, for which no silo retires."""


class Carrier(Protocol):
    """Takes one request to each named silo and waits for answers. Who does not answer in time is left out."""

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]: ...


@dataclass(frozen=True)
class Patience:
    """How long the server waits, in seconds."""

    joining: float = 120.0  # for every silo to be there
    continuing: float = 60.0  # for the same when a run continues; it goes on without those who are not there
    round: float = 600.0  # for a round's answers; who is later counts as absent


class Coordinator:
    """Runs an experiment in a folder over a carrier, one durable round at a time."""

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        folder: Path,
        carrier: Carrier,
        patience: Patience | None = None,
    ) -> None:
        self.config, self.carrier, self.patience = config, carrier, patience or Patience()
        self.files = RunFolder(folder)
        self.files.make(fresh=False)
        self.names = tuple(sorted(names))
        self.terms = Terms(config, self.names)
        self._continuing = self.files.checkpoint.exists()
        kind = self._kind(self._cards())
        self.simulation = kind[2]
        self.join = self._invitation()
        self.plans = {f.name: self.terms.plan(f) for f in self.join.facts}
        self._model(kind)
        self._invite()
        foreign = foreign_parts(config.method, self.terms.method)
        self.ledger = self.files.open_ledger(self.join.run, Unseen(self.simulation), foreign_parts=foreign)
        self.ledger.declare(self.plans.values())
        if self.files.checkpoint.exists():
            self.server.restore(load_state(self.files.checkpoint))
        self.metrics = MetricsFile(self.files.metrics, self.server.state.round)
        self._once = OpenedOnce(self.files.opened)
        self.bytes_up: dict[str, int] = {}
        self.bytes_down: dict[str, int] = {}

    @property
    def rounds_planned(self) -> int:
        return self.config.run.rounds

    @property
    def _joining(self) -> float:
        return self.patience.continuing if self._continuing else self.patience.joining

    def _cards(self) -> dict[str, Card]:
        """Every silo must be there when a run begins. When it continues, who is not there counts as absent."""
        answers = self.carrier.ask(Kind.HELLO, dict.fromkeys(self.names, b""), self._joining)
        missing = [n for n in self.names if n not in answers or answers[n].refused is not None]
        if missing and not (self._continuing and len(missing) < len(self.names)):
            raise UserError(
                f"no answer from {_some(missing)} within {self._joining:g} s: start node and silo, then run again"
            )
        cards = {}
        for name in (n for n in self.names if n not in missing):
            try:
                cards[name] = self._card(name, answers[name])
            except UserError as odd:
                if not self._continuing:
                    raise
                LOG.warning("going on without %s: %s", name, odd)
        return cards

    def _kind(self, cards: Mapping[str, Card]) -> Kinds:
        """In what all are alike; written down once, so that nobody can tell a restarted server otherwise."""
        path = self.files.path / KINDS
        if path.exists():
            shape, classes, simulation = json.loads(path.read_bytes())
            return tuple(shape), classes, simulation
        kinds = {card.kind for card in cards.values()}
        if len(kinds) != 1:
            raise UserError("silos differ in the shape of records, in classes or in simulation: make them alike")
        self.files.write(path, json.dumps(min(kinds)).encode())
        return min(kinds)

    def _card(self, name: str, answer: Answer) -> Card:
        """What a silo says of itself, which has to be what was agreed."""
        card, agreed = Card.read(name, answer), {f.name: f for f in self.terms.agreed()}[name]
        if card.facts.name != name:
            raise UserError(f"the node of {name!r} speaks for {card.facts.name!r}: register it under that name")
        if card.digest != digest(self.config):
            raise UserError(f"silo {name!r} agreed to another experiment: give all the same experiment file")
        said = replace(card.facts, participations=agreed.participations)
        if said != agreed:
            raise UserError(
                f"silo {name!r} has {said.records} records, {said.validation} for validation, and grants ε = "
                f"{said.budget:g}; agreed are {agreed.records}, {agreed.validation} and {agreed.budget:g}: "
                "correct [run.silos] in everybody's experiment file, or the silo's own"
            )
        return card

    def _invitation(self) -> Join:
        """Made once; a restarted server repeats it word for word."""
        path = self.files.path / INVITATION
        if path.exists():
            return self._kept(Join.decode(path.read_bytes()))
        facts = self.terms.agreed()
        plans = {f.name: self.terms.plan(f) for f in facts}
        join = Join(
            run=secrets.token_hex(8),
            digest=digest(self.config),
            spec=self.terms.spec.to_dict(),
            facts=facts,
            multipliers={name: self.terms.multiplier(plan) for name, plan in plans.items()},
            adaptive=any(adapts(plan) for plan in plans.values()),
        )
        self.files.write(path, join.encode())
        return join

    def _kept(self, join: Join) -> Join:
        if join.names != self.names or join.digest != digest(self.config):
            raise UserError(f"{self.files.path} holds another run: continue that one, or choose another folder")
        return join

    def _model(self, kind: Kinds) -> None:
        """The first model, the frame and the server, from public shapes alone."""
        experiment = _without_data(self.config, kind)
        method = self.terms.method
        self.data = prepare(experiment, method)
        self.backend = LoopBackend(self.data.model)
        shared = self.backend.layout.where(method.wrapper.shared).to(self.data.first.device)
        join, dimension, features = self.join, int(shared.sum()), self.data.features
        public = self.terms.public(join.facts, join.multipliers, dimension, join.adaptive, features)
        self.frame = Frame(self.backend, method.training, method.policy, shared, self.terms.metrics, public)
        first, run, limits = self.data.first[shared], self.join.run, (self.config.run.average, self.terms.bounds)
        self.server = Server(method, public, self.terms.cohorts, run, self.frame, first, *limits)

    def _invite(self) -> None:
        answers = self.carrier.ask(Kind.JOIN, dict.fromkeys(self.names, self.join.encode()), self._joining)
        for name in self.names:
            refused = answers[name].refused if name in answers else Code.UNAVAILABLE
            if refused is None:
                continue
            if not self._continuing:
                raise UserError(f"silo {name!r} does not join: {refused}{_advice(refused)}")
            LOG.warning("going on without %s: %s", name, refused)  # it answers later rounds, or is absent

    def rounds(self) -> Iterator[RoundRecord]:
        while not self.server.finished:
            yield self.step()

    def step(self) -> RoundRecord:
        """One round: propose, note what was asked, wait, open, aggregate, observe, checkpoint."""
        server, proposal = self.server, self.server.propose()
        self._note_asked(proposal)
        bodies = {b.client: encode(b) for b in proposal.broadcasts}
        answers = self.carrier.ask(Kind.ROUND, bodies, self.patience.round)
        blobs = {n: answers[n].body for n in proposal.asked if n in answers and answers[n].refused is None}
        refused = {n: str(c) for n, a in answers.items() if (c := a.refused) is not None and c not in TRANSIENT}
        expected = {b.client: self._expected(b) for b in proposal.broadcasts if b.client in blobs}
        read = server.read(proposal, blobs, expected)
        self.bytes_down = {n: len(body) for n, body in bodies.items()}
        self.bytes_up = {n: len(blob) for n, blob in blobs.items()}
        opened = self._once.open(
            proposal.round,
            self.data.first.device,
            lambda: self._open(proposal, read.messages, expected) if blobs else None,
        )
        moved = server.advance(opened, {n: c for n, c in refused.items() if c not in OWN_FAULT})
        public = {} if self.data.proxy is None else evaluate(self.backend, self.model, self.data.proxy)
        server.observe(proposal, opened, public)
        record = RoundRecord(
            round=proposal.round,
            bounds={name: proposal.decisions[name].bound for name in proposal.asked},
            answered=len(read.messages),
            refused=refused,
            abandoned=not moved,
            reserved=self.ledger.share_made(),
            public=public,
            paid=paid(opened),
            simulated=self._simulated(),
            impossible=read.impossible,
        )
        self.metrics.append(record)
        save_state(self.files.checkpoint, server.state.to_dict())
        return record

    def _note_asked(self, proposal: Proposal) -> None:
        """The server's own ledger: whatever was asked may have been released, whether it arrived or not."""
        for b in proposal.broadcasts:
            try:
                self.ledger.reserve(self._event(b))
            except Refused:
                continue  # the silo will refuse as well, and retire

    def _event(self, b: Broadcast) -> tuple[Release, ...]:
        return self.terms.method.mechanism.events(*self._agreed(b))

    def _expected(self, b: Broadcast) -> Expected:
        return self.terms.method.mechanism.expected(*self._agreed(b))

    def _agreed(self, b: Broadcast) -> tuple[ClientFacts, PrivacyPlan, Frame, Broadcast, int]:
        """All that decides an honest answer; how often the silo took part is the server's own count."""
        facts = self.join.facts[self.names.index(b.client)]
        earlier = len({r.round for r in self.ledger.spent(b.client) if r.round < b.round})
        return facts, self.plans[b.client], self.frame, b, earlier

    def _open(
        self, proposal: Proposal, messages: Sequence[Message], expected: Mapping[str, Expected]
    ) -> Opened | None:
        events = {b.client: self._event(b) for b in proposal.broadcasts if b.client in expected}
        return self.server.open(proposal, messages, events, expected)

    @property
    def model(self) -> Tensor:
        return self.server.whole(self.data.first)

    def _simulated(self) -> dict[str, float]:
        if not len(self.data.test):
            return {}
        return {f"test_{k}": v for k, v in evaluate(self.backend, self.model, self.data.test).items()}

    def finish(self) -> None:
        """Write what the server has, and let silos write their certificates."""
        from safetensors.torch import save

        named = self.backend.layout.named(self.model)
        own = {n: v.detach().cpu().contiguous() for n, v in named.items() if self.terms.method.wrapper.shared(n)}
        about = {"run": self.join.run, "round": str(self.server.state.round)}
        self.files.write(self.files.model, bytes(save(own, metadata=about)))
        certificate = Certificate.from_ledger(self.ledger)
        certificate.write(self.files.certificate)
        self._report(certificate)
        self.carrier.ask(Kind.FINISH, dict.fromkeys(self.names, self.join.run.encode()), self.patience.joining)

    def _report(self, certificate: Certificate) -> None:
        """Page and picture, of what the server knows: no client's accuracy, and its own only in simulation."""
        config, records = self.config, read_records(self.files.metrics)
        budgets = {f.name: f.budget for f in self.join.facts}
        simulated = last(record.simulated for record in records)
        summary = Summary(
            method=self.terms.method.name,
            model=config.model.name,
            dataset=f"{len(budgets)} silos",
            note=" ".join(self.terms.method.notes),
            run=self.join.run,
            seed=config.run.seed,
            simulation=self.simulation,
            clients=len(budgets),
            retired=len(self.server.state.retired),
            rounds=len(records),
            rounds_planned=self.rounds_planned,
            accuracy=simulated.get("test_accuracy"),
            loss=simulated.get("test_loss"),
            public=last(record.public for record in records),
            paid=last(record.paid for record in records),
            groups=tuple(groups(budgets, certificate, records, {})),
        )
        self.files.write(self.files.config, to_toml(config, notes=False).encode())
        write_report(self.files, summary, certificate, records)

    def close(self) -> None:
        self.ledger.close()


@dataclass(frozen=True)
class Unseen:
    """What the server's certificate says of noise: that it cannot know."""

    simulation: bool

    def describe(self) -> dict[str, Any]:
        said = (
            "SIMULATION: the silos say that they draw their noise from a seed, which protects nobody."
            if self.simulation
            else "The silos draw their own noise; the server cannot know how. Each silo's own certificate says."
        )
        return {
            "source": "unseen",
            "simulation": self.simulation,
            "sentence": f"{said} This is the server's record of what it asked for: silos may have released less.",
        }

    def normal(self, *_: Any, **__: Any) -> Any:
        raise UserError("the server of a deployed run draws no noise")

    uniform = coins = normal


def _without_data(config: Config, kind: Kinds) -> Experiment:
    """The experiment over stand-in records of the right shape. In simulation, proxy and test records are real."""
    shape, classes, simulation = kind
    records = Arrays(np.zeros((2, *shape), dtype=np.float32), np.array([0, 1]))
    nothing = Arrays.empty(records)
    stand_in = ClientData("stand-in", records, nothing, nothing)
    test, proxy, proxy_validation, proxy_classes = nothing, nothing, nothing, 0
    if simulation:
        real = federation(config).data
        test, proxy, proxy_validation = real.test, real.proxy, real.proxy_validation
        proxy_classes = real.proxy_classes
    name = config.data.features
    data = FederatedData(
        "deployed",
        (stand_in,),
        test,
        classes,
        proxy,
        proxy_validation,
        proxy_classes,
        geometry=load_geometry(name) if name is not None and is_file(name) else None,
    )
    run = config.run
    return Experiment(
        federation=Federation(data, (1.0,)),
        method=config.method,
        model=config.model.name,
        rounds=run.rounds,
        seed=run.seed,
        device=run.device,
        model_options=dict(config.model.options),
    )


def _advice(code: Code) -> str:
    return {
        Code.UNKNOWN_RUN: ": it belongs to another run; a new run needs a new folder, and draws on its account",
        Code.BUDGET: ": its budget, or what its account has left over all runs, is too small for this run",
        Code.FACTS_DIFFER: ": its records, budget or noise are not those of [run.silos]: correct either",
        Code.NOISE_TOO_SMALL: ": its calibrated noise is under its own floor",
        Code.WEAKER_VIEW: ": the method's view trusts somebody whom the silo does not trust",
        Code.UNAVAILABLE: ": it gave no answer in time",
    }.get(code, "")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 5 else shown
