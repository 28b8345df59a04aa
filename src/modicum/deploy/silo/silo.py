"""One silo: checks every request against its own grant before it touches data, and computes, charges and noises by
itself. The server only proposes.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modicum.compute.clipping.switches import refuse_half, refuse_undetermined, repeatable
from modicum.core.facts import ClientFacts
from modicum.core.memory import keep_pages
from modicum.core.messages import Broadcast, decode
from modicum.core.needs import Offer, check_data
from modicum.core.parts import Method
from modicum.core.records import fields_to_json
from modicum.core.store import write_durably
from modicum.deploy.silo.account import account_of
from modicum.deploy.silo.accounts import check_accounts, remember_accounts
from modicum.deploy.silo.attested import FILE as ATTESTED
from modicum.deploy.silo.attested import Part, write_attested
from modicum.deploy.silo.envelope import sign_answer, unseal
from modicum.deploy.silo.grant import too_much, within
from modicum.deploy.silo.own import own_experiment
from modicum.deploy.silo.signing import raw_public, read_public, read_server, read_signing_key
from modicum.deploy.silo.spec import FIRST, SiloSpec
from modicum.deploy.silo.taking_part import Agreement, TakingPart, agree
from modicum.deploy.silo.terms import Join, Terms, agreed_parts, check_agreed, digest
from modicum.deploy.silo.versions import versions
from modicum.deploy.silo.wire import ADVICE, SECURE, SMALL, Answer, Code, Kind, Refuse, read_step
from modicum.errors import UserError, counted
from modicum.federation.experiment import Prepared, prepare
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import adapts
from modicum.privacy.accounting.choose import shown
from modicum.privacy.certificate import Certificate
from modicum.privacy.lifetime import DrawRefused
from modicum.privacy.noise import CryptoNoise, NoiseSource, SimulatedNoise
from modicum.privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LOG = logging.getLogger("modicum.silo")
JOINED, TICKET = "joined.json", "ticket"
MARGIN = 1.5  # a proposal is at most this much larger than the model it carries


class Silo:
    """Answers requests. Its folder holds all that it must remember; opening it again continues."""

    def __init__(self, spec: SiloSpec) -> None:
        self.spec, self.threads = spec, spec.threads or torch.get_num_threads()
        if spec.device == "cpu":
            keep_pages()
        self.files = RunFolder(spec.folder)
        self.files.make(fresh=False)
        self._key, self._server = own_keys(spec)
        self.experiment = own_experiment(spec)
        self._refuse_methods_without_privacy()
        self.noise: NoiseSource = SimulatedNoise(spec.experiment.run.seed) if spec.simulation else CryptoNoise()
        self.account = account_of(spec, self.experiment.federation.data.clients[0])
        self.taking_part: TakingPart | None = None
        self._prepared: Prepared | None = None
        saved = spec.folder / JOINED
        if saved.exists():
            self._begin(_joined(saved))
        elif self.files.ledger.exists():
            raise UserError(f"{spec.folder} has lost {JOINED}: put it back to continue that run")

    def _refuse_methods_without_privacy(self) -> None:
        """Before anybody asks: a method that claims no ε fits no finite grant, whoever else takes part.

        Nor does one whose parts need what the silo's records do not offer.
        """
        terms = Terms(self.spec.experiment, (self.spec.name,))
        try:
            plan, method = terms.plan(self.facts), terms.method
        except UserError:
            return  # it has no plan for one client alone; the plan for all of them is checked on joining
        check_data(method, self._offer)
        if math.isinf(plan.budget) and not within(plan, self.spec.grant):
            raise UserError(too_much(terms, plan, self.spec.grant))

    def prepared(self, method: Method) -> Prepared:
        """Its records as tensors, and a model that can be trained here: before a run is joined or held."""
        if self._prepared is None:
            prepared = prepare(self.experiment, method)
            refuse_half(prepared.model.parameters())
            with repeatable(torch.device(self.spec.device), self.threads):
                refuse_undetermined(prepared.model, prepared.records[0].x)
            self._prepared = prepared
        return self._prepared

    def terms(self, names: tuple[str, ...]) -> Terms:
        """The agreed experiment for these silos and the model that it trains."""
        terms = Terms(self.spec.experiment, names)
        return terms.for_model(self.prepared(terms.method))

    @property
    def _offer(self) -> Offer:
        """What its own records offer to a method's parts; public data are the server's."""
        return Offer(validation=self.facts.validation > 0)

    def close(self) -> None:
        """Write the certificate of what was released so far, and close ledger and account."""
        if self.taking_part is not None:
            self.write_certificate()
            self.taking_part.close()
        self.account.close()

    def limit(self, kind: int) -> int:
        """The most bytes that a request of this kind may claim."""
        if kind in (Kind.ROUND, Kind.MASKED) and self.taking_part is not None:
            return int(MARGIN * self.taking_part.model_bytes) + (1 << 16)
        return SMALL

    def answer(self, kind: int, body: bytes) -> Answer:
        """The signed answer to one request. No exception, and no text of one, ever gets out of here."""
        with repeatable(torch.device(self.spec.device), self.threads):
            return sign_answer(self._key, kind, body, self._answer(kind, body))

    def _answer(self, kind: int, body: bytes) -> Answer:
        handlers: dict[int, Callable[[bytes], bytes]] = {
            Kind.HELLO: self._hello,
            Kind.JOIN: self._join,
            Kind.ROUND: self._round,
            Kind.FINISH: self._finish,
            **{kind: partial(self._step, kind) for kind in SECURE},
        }
        try:
            if kind not in handlers:
                raise Refuse(Code.MALFORMED)
            return Answer(handlers[kind](self._opened(kind, body)))
        except Refuse as refusal:
            LOG.warning("refused a request (%s): %s", kind, refusal.code)
            return Answer(refused=refusal.code)
        except Exception:  # for the operator's eyes only
            LOG.exception("a request could not be served")
            return Answer(refused=Code.UNAVAILABLE)

    def _opened(self, kind: int, body: bytes) -> bytes:
        """What the agreed server asks of this silo, in the run that it takes part in. Anybody may say HELLO."""
        if kind == Kind.HELLO:
            return b""
        run, content = unseal(self._server, kind, self.spec.name, body)
        if kind != Kind.JOIN:
            if self.taking_part is None:
                raise Refuse(Code.NOT_JOINED)
            if run != self.taking_part.join.run:
                raise Refuse(Code.UNKNOWN_RUN)
        return content

    @property
    def ticket(self) -> str:
        """A fresh name of this folder: whoever was invited under another one is not meant."""
        if self.taking_part is not None:
            return self.taking_part.join.tickets[self.spec.name]
        path = self.spec.folder / TICKET
        if not path.exists():
            write_durably(path, secrets.token_hex(16).encode())
        return path.read_text(encoding="ascii")

    @property
    def facts(self) -> ClientFacts:
        """What everyone may know of this silo; participations follow from the schedule."""
        own = self.experiment.federation.data.clients[0]
        return ClientFacts(self.spec.name, len(own.train), self.spec.grant.budget, 1, len(own.validation))

    def _hello(self, _: bytes) -> bytes:
        facts, data = self.facts, self.experiment.federation.data
        card = {
            "name": facts.name,
            "records": facts.records,
            "validation": facts.validation,
            "budget": None if math.isinf(facts.budget) else facts.budget,
            "shape": fields_to_json(data.inputs),
            "classes": data.classes,
            "simulation": self.spec.simulation,
            "digest": digest(self.spec.experiment),
            "agreed": agreed_parts(self.spec.experiment),
            "versions": versions(),
            "run": self.taking_part.join.run if self.taking_part else None,
            "ticket": self.ticket,
            "account": self._statement(),
        }
        return json.dumps(card, sort_keys=True).encode()

    def _join(self, body: bytes) -> bytes:
        try:
            join = Join.decode(body)
        except Exception:
            raise Refuse(Code.MALFORMED) from None
        known = self.taking_part
        if known is not None:
            if join.run != known.join.run:
                raise Refuse(Code.UNKNOWN_RUN)
            if join != known.join:
                raise Refuse(Code.FACTS_DIFFER)
        else:
            if self.spec.run not in (FIRST, join.run):
                raise Refuse(Code.UNKNOWN_RUN)
            plan = self._check_terms(join)
            if join.tickets.get(self.spec.name) != self.ticket:
                raise Refuse(Code.REPLAYED)
            check_accounts(self.spec, self.account, join)
            self._hold(join, plan)
            self.spec.folder.mkdir(parents=True, exist_ok=True)
            write_durably(self.spec.folder / JOINED, join.encode())
            self._begin(join)
        assert self.taking_part is not None
        part = self.taking_part
        return json.dumps({"multiplier": part.terms.multiplier(part.plan), "account": self._statement()}).encode()

    def _hold(self, join: Join, plan: PrivacyPlan) -> None:
        """The whole run's price, in the account of these records, before anything else is written."""
        try:
            self.account.hold(join, plan)
        except DrawRefused as refusal:
            LOG.warning("the account refuses run %s: %s", join.run, refusal)
            raise Refuse(Code.BUDGET) from None

    def _check_terms(self, join: Join) -> PrivacyPlan:
        """Is this the run that the silo's operator agreed to? Public values only. Returns the plan for it."""
        grant, own = self.spec.grant, self.facts
        if self.spec.name not in join.names:
            raise Refuse(Code.UNKNOWN_CLIENT)
        if join.digest != digest(self.spec.experiment):
            LOG.warning(
                "the server's experiment is not the copy that this silo read when it started: %s",
                ADVICE[Code.EXPERIMENT_DIFFERS],
            )
            raise Refuse(Code.EXPERIMENT_DIFFERS)
        try:
            spec = Terms(self.spec.experiment, join.names).spec
        except UserError:
            raise Refuse(Code.WEAKER_VIEW) from None
        views = {spec.view.to_dict()["kind"], join.spec.get("view", {}).get("kind")}
        if views != {grant.view}:
            raise Refuse(Code.WEAKER_VIEW)
        agreed = (str(spec.unit), str(spec.adjacency)) == (grant.unit, grant.adjacency)
        if join.spec != spec.to_dict() or not agreed or spec.delta > grant.delta:
            raise Refuse(Code.SPEC_DIFFERS)
        try:
            terms = self.terms(join.names)
        except UserError as odd:
            LOG.warning("the model cannot be trained here: %s", odd)
            raise Refuse(Code.CANNOT_TRAIN) from None
        said = join.facts[join.names.index(own.name)]
        own = replace(own, participations=terms.participations(own.name))
        if said != own or not terms.as_agreed(join.facts):
            raise Refuse(Code.FACTS_DIFFER)
        if own.participations > grant.rounds:
            raise Refuse(Code.TOO_MANY_ROUNDS)
        try:
            check_data(terms.method, self._offer)
        except UserError as unmet:
            LOG.warning("%s", unmet)
            raise Refuse(Code.FACTS_DIFFER) from None
        try:
            agreement = agree(self, join, terms)
        except UserError:  # the budget is too small for any plan: the operator's log says more
            LOG.exception("no plan fits the budget")
            raise Refuse(Code.BUDGET) from None
        plan = agreement.plan
        if not within(plan, grant):
            raise Refuse(Code.BUDGET)
        if any(r.noise_multiplier < grant.smallest_noise for r in plan.releases):
            raise Refuse(Code.NOISE_TOO_SMALL)
        if join.adaptive != adapts(plan) or (not adapts(plan) and not agreement.same_noise()):
            raise Refuse(Code.FACTS_DIFFER)
        self._check_secure(agreement)
        return plan

    def check_beforehand(self) -> str:
        """Asks itself what the run will ask, as far as the experiment file tells; raises what would be refused."""
        config = self.spec.experiment
        terms = self.terms(tuple(sorted(config.run.silos)) or (self.spec.name,))
        if not config.run.silos:
            terms.plan(self.facts)
            return "the experiment names no silos under [run.silos]: only this one's own plan could be checked"
        if self.spec.name not in terms.names:
            raise UserError(f"the experiment's [run.silos] does not name {self.spec.name!r}: agree on it there")
        agreed = terms.agreed()
        own = agreed[terms.names.index(self.spec.name)]
        check_agreed(replace(self.facts, participations=own.participations), own)
        plans, _ = terms.plans(agreed, self.experiment, self.prepared(terms.method))
        try:
            plan = self._check_terms(terms.invitation("beforehand", plans, {}))
        except Refuse as refusal:
            why = ADVICE.get(refusal.code, "the log above says more")
            raise UserError(f"the run would be refused, {refusal.code}: {why}") from None
        self.account.afford(plan)
        multiplier, rounds = terms.multiplier(plan), own.participations
        return (
            f"would join: {counted(rounds, 'round')}, noise multiplier {multiplier:.4g}, "
            f"ε = {shown(plan.budget)} of {self.spec.grant.budget:g}{_batches(plan)}"
        )

    def _check_secure(self, agreement: Agreement) -> None:
        """Behind secure aggregation a silo counts others' noise: it takes nothing about them from the server."""
        terms = agreement.terms
        if not terms.secure:
            return
        from modicum.deploy.silo.secure import check_terms  # needs an extra that other views do not

        try:
            if terms.agreed() != agreement.join.facts:
                raise UserError(
                    "what the server says of the silos is not in the experiment file: give all parties one file"
                )
            secure = agreement.secure()
            check_terms(secure)
        except UserError as odd:
            LOG.warning("secure aggregation: %s", odd)
            raise Refuse(Code.FACTS_DIFFER) from None

    def _begin(self, join: Join) -> None:
        self.taking_part = TakingPart(self, join)
        LOG.info("taking part in run %s as %s", join.run, self.spec.name)

    def _round(self, body: bytes) -> bytes:
        assert self.taking_part is not None
        return self.taking_part.answer(_proposal(body))

    def _step(self, kind: Kind, body: bytes) -> bytes:
        """One step of secure aggregation; the proposal comes with that in which the input leaves."""
        assert self.taking_part is not None
        round, request, proposal = read_step(body)
        if (kind is Kind.MASKED) != bool(proposal):
            raise Refuse(Code.MALFORMED)
        broadcast = _proposal(proposal) if proposal else None
        return self.taking_part.step(kind, round, request, broadcast)

    def _finish(self, body: bytes) -> bytes:
        assert self.taking_part is not None
        remember_accounts(self.spec, self.account, body)
        self.taking_part.finish()
        part = self.write_certificate()
        return json.dumps({"account": self._statement(), "attested": vars(part)}).encode()

    def _statement(self) -> list[Any] | None:
        """How far its account has come, signed for whoever is told; None where none is kept."""
        shown = self.account.shown()
        return None if shown is None else shown.signed(self._key, self.spec.name).to_list()

    def write_certificate(self) -> Part:
        """What this silo guarantees to the people behind its records, from its own ledger; signed."""
        assert self.taking_part is not None
        ledger = self.taking_part.ledger
        certificate = Certificate.from_ledger(ledger, self.account.statement(ledger.run_id))
        certificate.write(self.files.certificate)
        part = Part.of(self.spec.name, ledger, certificate, self._key)
        write_attested(self.spec.folder / ATTESTED, [part])
        return part


def _batches(plan: PrivacyPlan) -> str:
    """How drawn records are computed, where a plan says so."""
    samplers = dict.fromkeys(r.sampler for r in plan.releases)
    said = [s.shape.sentence() for s in samplers if s.shape is not None]
    return f"; Poisson batches {said[0]}" if said else ""


def _proposal(body: bytes) -> Broadcast:
    try:
        broadcast = decode(body)
    except UserError:
        raise Refuse(Code.MALFORMED) from None
    if not isinstance(broadcast, Broadcast):
        raise Refuse(Code.MALFORMED)
    return broadcast


def own_keys(spec: SiloSpec) -> tuple[Ed25519PrivateKey, bytes]:
    """(its own key, the server's public one), as agreed in its copy of the experiment file."""
    key, agreed = read_signing_key(spec.key), spec.experiment.run.silos.get(spec.name)
    if agreed is not None and read_public(spec.name, agreed.key) != raw_public(key):
        raise UserError(
            f"the key in {spec.key} is not the one that was agreed for {spec.name!r}: correct key under "
            "[run.silos] in everybody's experiment file, or put the right key back"
        )
    return key, read_server(spec.experiment.run.server)


def _joined(path: Path) -> Join:
    try:
        return Join.decode(path.read_bytes())
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged, or another version of Modicum joined that run: finish it with that version"
        ) from None
