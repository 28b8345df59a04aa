"""One silo: checks every request against its own grant before it touches data, and computes, charges and noises by
itself. The server only proposes.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modicum.compute.loop import LoopBackend
from modicum.config import Config, experiment_over, federation
from modicum.core.layout import Layout
from modicum.core.messages import Broadcast, decode, encode, finite
from modicum.core.needs import Offer, check_data
from modicum.core.parts import Batch, ClientFacts, ClientKit, ClipRule, Losses
from modicum.core.store import write_durably
from modicum.data.arrays import Arrays, FederatedData
from modicum.deploy.silo.account import account_of
from modicum.deploy.silo.grant import GrantWatch, objection
from modicum.deploy.silo.spec import FIRST, Grant, SiloSpec
from modicum.deploy.silo.terms import Join, Terms, digest
from modicum.deploy.silo.wire import SMALL, Answer, Code, Kind, Refuse
from modicum.errors import UserError
from modicum.federation.clients import Answer as Answered
from modicum.federation.clients import Client, Clients
from modicum.federation.experiment import Experiment, Federation, prepare
from modicum.federation.foreign import foreign_parts
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import adapts, first_state, make_kit
from modicum.privacy.accounting.choose import shown
from modicum.privacy.budgets import Reason, Refusal
from modicum.privacy.certificate import Certificate
from modicum.privacy.lifetime import DrawRefused
from modicum.privacy.noise import CryptoNoise, NoiseSource, SimulatedNoise
from modicum.privacy.plan import PrivacyPlan

LOG = logging.getLogger("modicum.silo")
JOINED = "joined.json"
MARGIN = 1.5  # a proposal is at most this much larger than the model it carries

FROM_LEDGER = {
    Reason.UNKNOWN_RUN: Code.UNKNOWN_RUN,
    Reason.UNKNOWN_CLIENT: Code.UNKNOWN_CLIENT,
    Reason.BAD_MODEL: Code.BAD_MODEL,
    Reason.BAD_BOUND: Code.BOUND_OUT_OF_RANGE,
    Reason.SPEC_DIFFERS: Code.SPEC_DIFFERS,
    Reason.NOT_PLANNED: Code.NOT_PLANNED,
    Reason.CONFLICT: Code.OUT_OF_ORDER,
    Reason.REPLAYED: Code.REPLAYED,
    Reason.PLAN_EXHAUSTED: Code.BUDGET,
    Reason.BUDGET_EXCEEDED: Code.BUDGET,
    Reason.NO_SOUND_CHARGE: Code.BUDGET,
}


class Silo:
    """Answers requests. Its folder holds all that it must remember; opening it again continues."""

    def __init__(self, spec: SiloSpec) -> None:
        self.spec = spec
        self.files = RunFolder(spec.folder)
        self.files.make(fresh=False)
        self.experiment = own_experiment(spec)
        self._refuse_methods_without_privacy()
        self.noise: NoiseSource = SimulatedNoise(spec.experiment.run.seed) if spec.simulation else CryptoNoise()
        self.account = account_of(spec, self.experiment.federation.data.clients[0])
        self.taking_part: _TakingPart | None = None
        saved = spec.folder / JOINED
        if saved.exists():
            self._begin(Join.decode(saved.read_bytes()))
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
            raise UserError(_too_much(terms, plan, self.spec.grant))

    @property
    def _offer(self) -> Offer:
        """What its own records offer to a method's parts; public data are the server's."""
        return Offer(validation=self.facts.validation > 0)

    def close(self) -> None:
        if self.taking_part is not None:
            self.write_certificate()
            self.taking_part.ledger.close()
        self.account.close()

    def limit(self, kind: int) -> int:
        """The most bytes that a request of this kind may claim."""
        if kind == Kind.ROUND and self.taking_part is not None:
            return int(MARGIN * self.taking_part.model_bytes) + (1 << 16)
        return SMALL

    def answer(self, kind: int, body: bytes) -> Answer:
        """The answer to one request. No exception, and no text of one, ever gets out of here."""
        handlers: dict[int, Callable[[bytes], bytes]] = {
            Kind.HELLO: self._hello,
            Kind.JOIN: self._join,
            Kind.ROUND: self._round,
            Kind.FINISH: self._finish,
        }
        try:
            if kind not in handlers:
                raise Refuse(Code.MALFORMED)
            return Answer(handlers[kind](body))
        except Refuse as refusal:
            LOG.warning("refused a request (%s): %s", kind, refusal.code)
            return Answer(refused=refusal.code)
        except Exception:  # for the operator's eyes only
            LOG.exception("a request could not be served")
            return Answer(refused=Code.UNAVAILABLE)

    @property
    def facts(self) -> ClientFacts:
        """What everyone may know of this silo; participations follow from the schedule."""
        own = self.experiment.federation.data.clients[0]
        return ClientFacts(self.spec.name, len(own.train), self.spec.grant.budget, 1, len(own.validation))

    def _hello(self, body: bytes) -> bytes:
        if body:
            raise Refuse(Code.MALFORMED)
        facts, data = self.facts, self.experiment.federation.data
        card = {
            "name": facts.name,
            "records": facts.records,
            "validation": facts.validation,
            "budget": None if math.isinf(facts.budget) else facts.budget,
            "shape": list(data.input_shape),
            "classes": data.classes,
            "simulation": self.spec.simulation,
            "digest": digest(self.spec.experiment),
            "run": self.taking_part.join.run if self.taking_part else None,
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
            self._draw(join, self._check_terms(join))
            self.spec.folder.mkdir(parents=True, exist_ok=True)
            write_durably(self.spec.folder / JOINED, join.encode())
            self._begin(join)
        assert self.taking_part is not None
        plan = self.taking_part.plan
        return json.dumps({"multiplier": self.taking_part.terms.multiplier(plan)}).encode()

    def _draw(self, join: Join, plan: PrivacyPlan) -> None:
        """The whole run's price, from the account of these records, before anything else is written."""
        try:
            self.account.draw(join, plan)
        except DrawRefused as refusal:
            LOG.warning("the account refuses run %s: %s", join.run, refusal)
            raise Refuse(Code.BUDGET) from None

    def _check_terms(self, join: Join) -> PrivacyPlan:
        """Is this the run that the silo's operator agreed to? Public values only. Returns the plan for it."""
        grant, own = self.spec.grant, self.facts
        if self.spec.name not in join.names:
            raise Refuse(Code.UNKNOWN_CLIENT)
        if join.digest != digest(self.spec.experiment):
            raise Refuse(Code.EXPERIMENT_DIFFERS)
        terms = Terms(self.spec.experiment, join.names)
        try:
            spec = terms.spec
        except UserError:
            raise Refuse(Code.WEAKER_VIEW) from None
        views = {spec.view.to_dict()["kind"], join.spec.get("view", {}).get("kind")}
        if views != {grant.view} or (terms.needs_aggregator and not self.spec.simulation):
            raise Refuse(Code.WEAKER_VIEW)
        agreed = (str(spec.unit), str(spec.adjacency)) == (grant.unit, grant.adjacency)
        if join.spec != spec.to_dict() or not agreed or spec.delta > grant.delta:
            raise Refuse(Code.SPEC_DIFFERS)
        said = join.facts[join.names.index(own.name)]
        own = replace(own, participations=terms.participations(own.name))
        if said != own:
            raise Refuse(Code.FACTS_DIFFER)
        if own.participations > grant.rounds:
            raise Refuse(Code.TOO_MANY_ROUNDS)
        try:
            check_data(terms.method, self._offer)
        except UserError as unmet:
            LOG.warning("%s", unmet)
            raise Refuse(Code.FACTS_DIFFER) from None
        try:
            plan = terms.plan(own)
        except UserError:  # the budget is too small for any plan: the operator's log says more
            LOG.exception("no plan fits the budget")
            raise Refuse(Code.BUDGET) from None
        if not within(plan, grant):
            raise Refuse(Code.BUDGET)
        if any(r.noise_multiplier < grant.smallest_noise for r in plan.releases):
            raise Refuse(Code.NOISE_TOO_SMALL)
        if join.adaptive != adapts(plan) or (not adapts(plan) and not self._same_noise(join, terms, plan)):
            raise Refuse(Code.FACTS_DIFFER)
        return plan

    def _same_noise(self, join: Join, terms: Terms, plan: PrivacyPlan) -> bool:
        said = join.multipliers.get(self.spec.name, -1.0)
        return math.isclose(said, terms.multiplier(plan), rel_tol=1e-9)

    def _begin(self, join: Join) -> None:
        self.taking_part = _TakingPart(self, join)
        LOG.info("taking part in run %s as %s", join.run, self.spec.name)

    def _round(self, body: bytes) -> bytes:
        if self.taking_part is None:
            raise Refuse(Code.NOT_JOINED)
        try:
            broadcast = decode(body)
        except UserError:
            raise Refuse(Code.MALFORMED) from None
        if not isinstance(broadcast, Broadcast):
            raise Refuse(Code.MALFORMED)
        return self.taking_part.answer(broadcast)

    def _finish(self, body: bytes) -> bytes:
        if self.taking_part is None:
            raise Refuse(Code.NOT_JOINED)
        if body != self.taking_part.join.run.encode():
            raise Refuse(Code.UNKNOWN_RUN)
        self.write_certificate()
        return b""

    def write_certificate(self) -> None:
        """What this silo guarantees to the people behind its records, from its own ledger."""
        assert self.taking_part is not None
        ledger = self.taking_part.ledger
        Certificate.from_ledger(ledger, self.account.statement(ledger.run_id)).write(self.files.certificate)


def within(plan: PrivacyPlan, grant: Grant) -> bool:
    """Whether all that the plan may release costs no more than was granted; a plan's budget is its true ε."""
    return plan.budget <= grant.budget


def _too_much(terms: Terms, plan: PrivacyPlan, grant: Grant) -> str:
    cost = "no ε at all" if math.isinf(plan.budget) else f"ε = {shown(plan.budget)}"
    return (
        f"{terms.method.name} as the experiment sets it guarantees {cost}, and the grant is ε = {grant.budget:g}: "
        "use a method in sound mode, or grant that much (inf for no privacy)"
    )


class _TakingPart:
    """A silo inside one run: its ledger, its plan and the client side that every engine shares."""

    def __init__(self, silo: Silo, join: Join) -> None:
        self.join, self.grant, self.name = join, silo.spec.grant, silo.spec.name
        self.terms = Terms(silo.spec.experiment, join.names)
        facts = join.facts[join.names.index(self.name)]
        self.plan = self.terms.plan(facts)
        if not within(self.plan, self.grant):
            raise UserError(_too_much(self.terms, self.plan, self.grant))
        method = self.terms.method
        data = prepare(silo.experiment, method)
        backend = LoopBackend(data.model)
        self.kit = make_kit(silo.experiment, method, data, backend, join.facts, join.multipliers, join.adaptive)
        self.account = silo.account
        self.account.draw(join, self.plan)
        foreign = foreign_parts(silo.spec.experiment.method, method, data.model)
        self.ledger = silo.files.open_ledger(join.run, silo.noise, foreign_parts=foreign)
        self.ledger.declare([self.plan])
        self.account.remember(self.ledger)
        self.dtype = data.first.dtype
        self.model_bytes = int(self.kit.shared.sum()) * data.first.element_size()
        client = Client(facts, self.plan, data.records[0], data.validation[0], first_state(data, self.kit))
        self.watch = GrantWatch(self.grant, method.mechanism.purpose)
        self.clients = Clients(
            method, self.kit, [client], self.ledger, silo.noise, silo.files.clients, watch=self.watch
        )

    def answer(self, b: Broadcast) -> bytes:
        self._check(b)
        try:
            answer = self._ask(b, self.kit)
        except Exception:  # what failed may depend on the records, so the message must not
            LOG.exception("round %d cannot be computed: zero plus noise is sent, and charged", b.round)
            answer = self._ask(b, replace(self.kit, backend=Zero(self.kit.backend.layout)))
        if isinstance(answer, Refusal):
            LOG.warning("round %d is refused: %s", b.round, self.watch.refused or answer.detail or answer.reason)
            raise Refuse(self.watch.refused or FROM_LEDGER.get(answer.reason, Code.NOT_PLANNED))
        self.account.remember(self.ledger)
        # The server proposes a round only after it has stored all earlier ones.
        self.clients.acknowledge(b.round)
        return encode(answer)

    def _ask(self, b: Broadcast, kit: ClientKit) -> Answered:
        self.clients.kit, self.watch.refused = kit, None
        return self.clients.answer([b])[b.client]

    def _check(self, b: Broadcast) -> None:
        """The proposal against the silo's own grant. Only the ledger's questions come after this."""
        if b.run != self.join.run:
            raise Refuse(Code.UNKNOWN_RUN)
        if b.client != self.name:
            raise Refuse(Code.UNKNOWN_CLIENT)
        if b.round >= self.terms.config.run.rounds:
            raise Refuse(Code.TOO_MANY_ROUNDS)
        reserved = self.clients.clients[self.name].rounds
        if reserved and b.round < max(reserved):
            raise Refuse(Code.REPLAYED if b.round in reserved else Code.OUT_OF_ORDER)
        if len(reserved | {b.round}) > self.grant.rounds:
            raise Refuse(Code.TOO_MANY_ROUNDS)
        if b.model.numel() != int(self.kit.shared.sum()) or b.model.dtype != self.dtype or not finite(b.model):
            raise Refuse(Code.BAD_MODEL)
        outside = objection(self.grant, b.decision.bound, b.decision.noise_multiplier)
        if outside is not None:
            raise Refuse(outside)


class Zero:
    """A backend that looks at nothing: its gradients are zero, so that a message is zero plus noise."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return theta.new_zeros(len(x), 1)

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:  # noqa: ARG002
        return torch.zeros_like(theta)

    def clipped_sums(
        self,
        theta: Tensor,
        batches: Sequence[Batch],
        losses: Losses,  # noqa: ARG002
        bounds: Sequence[float],  # noqa: ARG002
        rule: ClipRule,  # noqa: ARG002
    ) -> tuple[Tensor, list[Tensor]]:
        return torch.zeros_like(theta), [theta.new_zeros(len(batch)) for batch in batches]


def own_experiment(spec: SiloSpec) -> Experiment:
    """The agreed experiment over this silo's records alone, checked before anything is joined."""
    config = spec.experiment
    data = federation(config).data
    if spec.name not in data.names:
        shown = ", ".join(data.names[:5]) + (", …" if len(data.names) > 5 else "")
        raise UserError(f"there are no records of {spec.name!r} in {data.dataset}: it has {shown}")
    own = data.clients[data.names.index(spec.name)]
    nothing = Arrays.empty(own.train)
    alone = FederatedData(
        data.dataset,
        (own,),
        nothing,
        data.classes,
        proxy=nothing,
        proxy_validation=nothing,
        proxy_classes=0,
        geometry=data.geometry,
    )
    if config.run.hot_start and not spec.own_data:  # for trying things out: the experiment's own public records
        alone = replace(
            alone, proxy=data.proxy, proxy_validation=data.proxy_validation, proxy_classes=data.proxy_classes
        )
    elif config.run.hot_start:
        config = replace(config, run=replace(config.run, hot_start=_no_hot_start(config)))
    return experiment_over(config, Federation(alone, (spec.grant.budget,)))


def _no_hot_start(config: Config) -> int:
    """The server's first model reaches a silo with its first proposal; its personal layers do not."""
    method = Terms(config, tuple(config.run.silos)).method
    if getattr(method.wrapper, "personal", ()):
        raise UserError(
            "a hot start would have to reach this silo's personal layers, and it has no public records: set "
            "hot_start = 0 in everybody's experiment file, or share all layers"
        )
    return 0
