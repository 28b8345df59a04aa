"""The server of a deployed run: durable rounds over whatever carries requests to silos and answers back.

It knows what silos say of themselves and what they send, and nothing else. Killed at any moment, it continues the
same run: the invitation, the model, the policy's state and the record of what was asked are all on disk.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from modicum.compute.clipping.loop import LoopBackend
from modicum.config import Config, experiment_over, federation, task_in, to_toml
from modicum.core.needs import check_data
from modicum.core.records import fields_from_json, leaves
from modicum.core.release_gate import SERVER
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.data.geometry import load_geometry
from modicum.deploy.flower.card import Card, Kinds
from modicum.deploy.flower.secure_silos import SecureSilos
from modicum.deploy.flower.signed import Carrier, SignedCourier
from modicum.deploy.flower.silos import Silos
from modicum.deploy.silo.attested import FILE as ATTESTED
from modicum.deploy.silo.attested import Part, write_attested
from modicum.deploy.silo.secure import SecureTerms, check_terms
from modicum.deploy.silo.signing import read_public
from modicum.deploy.silo.terms import Join, Terms, agreed_parts, check_agreed, deployed, differences, digest
from modicum.deploy.silo.versions import differing, unlike, versions
from modicum.deploy.silo.wire import ADVICE, Answer, Code, Kind
from modicum.deploy.silo.witness import Statement, Witness
from modicum.errors import UserError, counted
from modicum.federation.checkpoints import Folder
from modicum.federation.evaluation import Evaluation
from modicum.federation.experiment import Experiment, Federation, compression_line, offer_of, prepare
from modicum.federation.foreign import foreign_parts
from modicum.federation.learning import stand_in_records
from modicum.federation.model_file import model_facts
from modicum.federation.records import RoundRecord, read_records
from modicum.federation.rounds import Rounds
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import make_kit, make_server
from modicum.federation.transcript_file import transcript_in
from modicum.privacy.certificate import Certificate
from modicum.public.features import is_file
from modicum.report.summary import Summary, groups, last, learned, traffic, void
from modicum.report.write import write_report

LOG = logging.getLogger("modicum.server")
INVITATION, KINDS, SECURE = "invitation.json", "kinds.json", "secure"
LONGEST = 16 << 20  # bytes of what a silo says when it joins or finishes, its certificate included
ACCOUNTS = "accounts.json"  # beside the server's key, which outlasts runs too


@dataclass(frozen=True)
class Patience:
    """How long the server waits, in seconds."""

    joining: float = 120.0  # for every silo to be there
    continuing: float = 60.0  # for the same when a run continues; it goes on without those who are not there
    round: float = 600.0  # for a round's answers; who is later counts as absent


class Coordinator:
    """Runs an experiment in a folder over silos that a courier reaches, one durable round at a time."""

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        folder: Path,
        carrier: Carrier,
        key: Path,
        patience: Patience | None = None,
    ) -> None:
        if config.run.audit is not None:
            raise UserError(
                "an audit plants canaries among records, which silos do not allow: leave out run.audit, and audit "
                "a simulation of the same experiment"
            )
        config = deployed(config)
        self.config, self.patience = config, patience or Patience()
        self.witness, self.accounts = Witness(key.with_name(ACCOUNTS)), dict[str, Statement]()
        self.files = RunFolder(folder)
        self.files.make(fresh=False)
        self.transcript = transcript_in(self.files, config.run.transcript)
        self.names = tuple(sorted(names))
        self.terms = Terms(config, self.names)
        self.terms.agreed()  # names every silo, whose keys stand beside it
        self.courier = SignedCourier(carrier, key, config)
        self._continuing = self.files.ledger.exists()  # everybody had joined before it was made
        cards = self._cards()
        kind = self._kind(cards)
        self.simulation = kind[2]
        self._derive(kind)
        self.join = self._invitation(cards)
        self.courier.run = self.join.run
        self._model()
        self._invite()
        foreign = foreign_parts(config.method, self.terms.method, self.data.model)
        self.ledger = self.files.open_ledger(self.join.run, NoiseAtSilos(self.simulation), foreign_parts=foreign)
        self.ledger.declare(self.plans.values())
        recorded = replace(config, run=replace(config.run, simulation=self.simulation))  # as the certificate
        self.files.write(self.files.config, to_toml(recorded, notes=False).encode())
        kept = Folder(self.files, self.server)
        self.silos = self._carrier()
        self._heard_draws = False
        self._rounds = Rounds(self.server, self.silos, self.evaluation, kept)

    def _carrier(self) -> Silos:
        common = (self.courier, self.patience.round, self.server, self.ledger, self.join.facts, self.plans)
        if self.secure is None:
            return Silos(*common, self.files.opened, self.transcript)
        folder = self.files.path / SECURE
        return SecureSilos(*common, self.files.opened, self.transcript, secure=self.secure, folder=folder)

    @property
    def rounds_planned(self) -> int:
        """Rounds of the whole run."""
        return self.config.run.rounds

    @property
    def _joining(self) -> float:
        return self.patience.continuing if self._continuing else self.patience.joining

    def _cards(self) -> dict[str, Card]:
        """Every silo must be there when a run begins. When it continues, who is not there counts as absent."""
        answers = self.courier.ask(Kind.HELLO, dict.fromkeys(self.names, b""), self._joining)
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
            return json.dumps(shape, sort_keys=True), classes, simulation
        usual = Counter(card.kind for card in cards.values()).most_common(1)[0][0]
        odd = [name for name, card in cards.items() if card.kind != usual]
        if odd:
            raise UserError(
                "silos differ in the shape of records, in classes or in simulation; unlike most are "
                f"{_some(odd)}: make them alike"
            )
        self._check_needs(usual)
        self.files.write(path, json.dumps([json.loads(usual[0]), *usual[1:]]).encode())
        return usual

    def _check_needs(self, kind: Kinds) -> None:
        """Before anything is written or asked for: public data are the server's, validation records agreed on."""
        offer = offer_of(_without_data(self.config, self.terms, kind).federation.data, task_in(self.config))
        held_out = all(facts.validation > 0 for facts in self.terms.agreed())
        check_data(self.terms.method, replace(offer, validation=held_out))

    def _card(self, name: str, answer: Answer) -> Card:
        """What a silo says of itself, which has to be what was agreed."""
        card, agreed = Card.read(name, answer), {f.name: f for f in self.terms.agreed()}[name]
        if card.facts.name != name:
            raise UserError(f"the node of {name!r} speaks for {card.facts.name!r}: register it under that name")
        if old := unlike(versions(), card.versions):
            raise UserError(f"silo {name!r} cannot take part: {old}")
        if odd := differing(versions(), card.versions):
            LOG.warning("%s runs other versions, which may change low bits: %s", name, odd)
        if card.digest != digest(self.config):
            odd = differences(agreed_parts(self.config), card.agreed)
            raise UserError(
                f"silo {name!r} agreed to another experiment: {odd} differ: {ADVICE[Code.EXPERIMENT_DIFFERS]}"
            )
        check_agreed(replace(card.facts, participations=agreed.participations), agreed)
        if not card.simulation:
            shown, new = card.account or Statement("", 0, ""), self.config.run.silos[name].account == "new"
            if behind := self.witness.objection(name, shown, new=new):
                raise UserError(behind)
        return card

    def _invitation(self, cards: Mapping[str, Card]) -> Join:
        """Made once; a restarted server repeats it word for word."""
        path = self.files.path / INVITATION
        if path.exists():
            return self._kept(Join.decode(path.read_bytes()))
        join = replace(
            self.terms.invitation(secrets.token_hex(8), self.plans, {n: card.ticket for n, card in cards.items()}),
            accounts={name: card.account for name, card in cards.items() if card.account is not None},
            heard={name: heard for name in self.names if (heard := self.witness.heard(name))},
        )
        self.files.write(path, join.encode())
        return join

    def _kept(self, join: Join) -> Join:
        if join.names != self.names or join.digest != digest(self.config):
            raise UserError(f"{self.files.path} holds another run: continue that one, or choose another folder")
        return join

    def _derive(self, kind: Kinds) -> None:
        """Everybody's plans, and the lattice of their noise, as silos derive them too."""
        self.experiment = _without_data(self.config, self.terms, kind)
        self.data = prepare(self.experiment, self.terms.method)
        self.terms = self.terms.for_model(self.data)
        self.plans, self.integers = self.terms.plans(self.terms.agreed(), self.experiment, self.data)

    def _model(self) -> None:
        """The first model, the kit and the server, from public shapes alone."""
        join, method, experiment = self.join, self.terms.method, self.experiment
        self.backend = LoopBackend(self.data.model)
        told = (join.facts, join.multipliers, join.adaptive)
        self.kit = make_kit(experiment, method, self.data, self.backend, *told, self.integers)
        self.secure: SecureTerms | None = None
        if self.terms.secure:
            assert self.integers is not None
            self.secure = SecureTerms(join, self.terms, self.integers)
            check_terms(self.secure)
        self.server = make_server(experiment, method, self.terms.cohorts, self.kit, self.data, join.run)
        self.evaluation = Evaluation(self.server, self.backend, self.data, experiment.evaluate_every)

    def _invite(self) -> None:
        answers = self.courier.ask(Kind.JOIN, dict.fromkeys(self.names, self.join.encode()), self._joining)
        for name in self.names:
            refused = answers[name].refused if name in answers else Code.UNAVAILABLE
            if refused is None:
                self._remember(name, answers[name])
                continue
            if not self._continuing:
                raise UserError(f"silo {name!r} does not join: {refused}{_advice(refused)}")
            LOG.warning("going on without %s: %s", name, refused)  # it answers later rounds, or is absent

    def _remember(self, name: str, answer: Answer) -> None:
        """How far a silo's account had come when it joined or finished, for the next run and for the others."""
        try:
            said = _said(answer).get("account")
            statement = None if said is None else Statement.from_list(said)
        except (ValueError, TypeError, AttributeError):
            LOG.warning("%s states its account in a way that this version does not know", name)
            return
        if statement is None:
            return
        if not statement.said_by(name, read_public(name, self.config.run.silos[name].key)):
            LOG.warning("%s does not sign what it states of its account", name)
            return
        self.accounts[name] = statement
        self.witness.keep({name: statement})

    def rounds(self) -> Iterator[RoundRecord]:
        """Run what is left, round by round."""
        for record in self._rounds:
            self._hear_draws(record)
            yield record

    def step(self) -> RoundRecord:
        """One round."""
        record = self._rounds.play()
        self._hear_draws(record)
        return record

    def _hear_draws(self, record: RoundRecord) -> None:
        """Whoever has answered has drawn on its account: remembered now, in case the run never ends."""
        there = {name: b"" for name, party in record.parties.items() if party["bytes_up"]}
        if self._heard_draws or self.simulation or not there:
            return
        self._heard_draws = True
        for name, answer in self.courier.ask(Kind.HELLO, there, self.patience.continuing).items():
            self._remember(name, answer)

    @property
    def model(self) -> Tensor:
        """All parameters as one vector, of the model that is reported."""
        return self.evaluation.model

    def finish(self) -> None:
        """Write what the server has, and let silos write their certificates."""
        from safetensors.torch import save

        named = self.backend.layout.named(self.model)
        own = {n: v.detach().cpu().contiguous() for n, v in named.items() if self.terms.method.wrapper.shared(n)}
        about = model_facts(self.experiment, self.data.model, self.join.run, self.server.state.round)
        self.files.write(self.files.model, bytes(save(own, metadata=about)))
        certificate = Certificate.from_ledger(self.ledger)
        certificate.write(self.files.certificate)
        self._report(certificate)
        said = json.dumps({name: one.to_list() for name, one in self.accounts.items()}).encode()
        answers = self.courier.ask(Kind.FINISH, dict.fromkeys(self.names, said), self.patience.continuing)
        parts = [Part.of(SERVER, self.ledger, certificate, self.courier.key)]
        for name, answer in answers.items():
            if answer.refused is None:
                self._remember(name, answer)
                parts += self._attested(name, answer)
        write_attested(self.files.path / ATTESTED, parts)

    def _attested(self, name: str, answer: Answer) -> list[Part]:
        """A silo's own certificate, which it signed; none where it is not one."""
        try:
            part = Part.from_dict(_said(answer).get("attested"))
            if part.party == name and part.signed(read_public(name, self.config.run.silos[name].key)):
                return [part]
        except (ValueError, TypeError, AttributeError):
            pass
        LOG.warning("%s sends no certificate that it signed: %s is without it", name, ATTESTED)
        return []

    def _report(self, certificate: Certificate) -> None:
        """Page and picture, of what the server knows: no client's accuracy, and its own only in simulation."""
        config, records = self.config, read_records(self.files.metrics)
        budgets = {f.name: f.budget for f in self.join.facts}
        simulated = last(record.simulated for record in records)
        summary = Summary(
            method=self.terms.method.name,
            model=config.model.name,
            dataset=counted(len(budgets), "silo"),
            note=" ".join(note for note in (compression_line(self.experiment), *self.terms.method.notes) if note),
            run=self.join.run,
            seed=config.run.seed,
            simulation=self.simulation,
            clients=len(budgets),
            retired=len(self.server.state.retired),
            rounds=len(records),
            rounds_planned=self.rounds_planned,
            accuracy=simulated.get("test_accuracy"),
            macro_f1=simulated.get("test_macro_f1"),
            **learned(task_in(self.config), simulated),
            loss=simulated.get("test_loss"),
            public=last(record.public for record in records),
            released=last(record.released for record in records),
            noise=last(record.noise for record in records),
            groups=tuple(groups(budgets, certificate, records, {})),
            traffic=traffic(records),
            void=void(records),
        )
        write_report(self.files, summary, certificate, records)

    def close(self) -> None:
        """Close transcript and ledger."""
        if self.transcript is not None:
            self.transcript.close()
        self.ledger.close()


@dataclass(frozen=True)
class NoiseAtSilos:
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

    uniform = coins = bits = normal


def _without_data(config: Config, terms: Terms, kind: Kinds) -> Experiment:
    """The experiment over stand-in records of the right shape. In simulation, proxy and test records are real."""
    said, classes, simulation = kind
    inputs = fields_from_json(json.loads(said))
    if config.run.hot_start and not simulation:
        raise UserError(
            "a deployed server has no public records to begin with: set hot_start = 0, or try it with simulation"
        )
    slot = config.data.slot
    records = stand_in_records(task_in(config), inputs, slot)
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
        values={name: field.values for name, field in leaves(inputs) if field.values is not None},
        slot=slot,
    )
    return replace(experiment_over(config, Federation(data, (1.0,))), bounds=terms.bounds)


def _said(answer: Answer) -> dict[str, Any]:
    """What a silo says beside its messages; what is long, or nested without end, is a ValueError."""
    if len(answer.body) > LONGEST:
        raise ValueError("too long")
    try:
        return answer.json()
    except RecursionError:
        raise ValueError("nested without end") from None


def _advice(code: Code) -> str:
    return f": {ADVICE[code]}" if code in ADVICE else ""


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 5 else shown
