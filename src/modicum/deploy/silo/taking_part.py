"""A silo inside one run: its ledger, its plan, and the client side that every engine shares."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Clip
from modicum.core.integers import Agreed
from modicum.core.layout import Layout
from modicum.core.messages import Broadcast, Message, Summand, encode, finite
from modicum.core.parts import Backend, Batch, ClientKit, Losses, Method
from modicum.deploy.silo.account import Account
from modicum.deploy.silo.grant import GrantWatch, objection, too_much, within
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.terms import Join, Terms
from modicum.deploy.silo.wire import Code, Kind, Refuse
from modicum.deploy.silo.withdrawal import Withdrawn
from modicum.errors import UserError, counted
from modicum.federation.clients import Answer as Answered
from modicum.federation.clients import Client, Clients
from modicum.federation.correlate import own_rows_source, place_of
from modicum.federation.experiment import Experiment, Prepared
from modicum.federation.foreign import foreign_parts
from modicum.federation.run_folder import RunFolder
from modicum.federation.setup import first_state, make_kit
from modicum.privacy.accounting.choose import shown
from modicum.privacy.ledger.budgets import Reason, Refusal
from modicum.privacy.lifetime import DrawRefused
from modicum.privacy.noise import NoiseSource
from modicum.privacy.noise.keyed import destroy_key
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.noise.one_place import OnePlace
from modicum.privacy.plan import PrivacyPlan

if TYPE_CHECKING:  # what secure aggregation needs is an extra of its own
    from modicum.deploy.silo.secure import SecureSilo, SecureTerms

LOG = logging.getLogger("modicum.silo")

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


@dataclass(frozen=True)
class Agreement:
    """An invitation in numbers: everybody's plans as this silo derives them. Not the server's word for it."""

    join: Join
    terms: Terms
    name: str
    data: Prepared
    plans: Mapping[str, PrivacyPlan]  # behind a sum all silos', else its own
    integers: Agreed | None

    @property
    def plan(self) -> PrivacyPlan:
        """This silo's own."""
        return self.plans[self.name]

    def same_noise(self) -> bool:
        """Whether the server told the multipliers that follow from the plans."""
        said = self.join.multipliers
        return all(
            math.isclose(said.get(name, -1.0), self.terms.multiplier(plan), rel_tol=1e-9)
            for name, plan in self.plans.items()
        )

    def secure(self) -> SecureTerms:
        """The terms of secure aggregation that this silo agreed to."""
        from modicum.deploy.silo.secure import SecureTerms

        assert self.integers is not None
        return SecureTerms(self.join, self.terms, self.integers)


class Holder(Protocol):
    """What a silo has that taking part in a run needs."""

    @property
    def spec(self) -> SiloSpec:
        """Who it is and what it grants."""

    @property
    def files(self) -> RunFolder:
        """Its own folder."""

    @property
    def experiment(self) -> Experiment:
        """The experiment over its own records."""

    @property
    def noise(self) -> NoiseSource:
        """Where its noise comes from."""

    @property
    def account(self) -> Account:
        """What its records have spent, and may."""

    def prepared(self, method: Method) -> Prepared:
        """Its records as tensors, and the model."""

    def terms(self, names: tuple[str, ...]) -> Terms:
        """The agreed experiment for these silos and the model that it trains."""


def agree(silo: Holder, join: Join, terms: Terms) -> Agreement:
    """What follows from an invitation and the silo's own copy of the experiment."""
    name, data = silo.spec.name, silo.prepared(terms.method)
    known = join.facts if terms.secure else (join.facts[join.names.index(name)],)
    plans, integers = terms.plans(known, silo.experiment, data)
    return Agreement(join, terms, name, data, plans, integers)


class TakingPart:
    """A silo inside one run: its ledger, its plan and the client side that every engine shares."""

    def __init__(self, silo: Holder, join: Join) -> None:
        self.join, self.grant, self.name = join, silo.spec.grant, silo.spec.name
        self.terms = silo.terms(join.names)
        facts = join.facts[join.names.index(self.name)]
        agreement = agree(silo, join, self.terms)
        self.plan, data = agreement.plan, agreement.data
        if not within(self.plan, self.grant):
            raise UserError(too_much(self.terms, self.plan, self.grant))
        method = self.terms.method
        backend = Careful(LoopBackend(data.model))
        self.kit = make_kit(
            silo.experiment, method, data, backend, join.facts, join.multipliers, join.adaptive, agreement.integers
        )
        self.account = silo.account
        self.account.hold(join, self.plan)
        made_by = silo.experiment.federation.data.made_by
        foreign = foreign_parts(silo.spec.experiment.method, method, data.model, made_by)
        self.ledger = silo.files.open_ledger(join.run, silo.noise, foreign_parts=foreign)
        self.ledger.declare([self.plan])
        self.account.remember(self.ledger)
        self.dtype = data.first.dtype
        self.model_bytes = int(self.kit.shared.sum()) * data.first.element_size()
        client = Client(facts, self.plan, data.records[0], data.validation[0], first_state(data, self.kit))
        self.withdrawn = Withdrawn(
            silo.spec,
            silo.experiment.federation.data.clients[0],
            method.mechanism.spec.unit,
            (client.records, client.validation),
        )
        self.watch = GrantWatch(self.grant, method.mechanism.purpose)
        self._key = silo.files.noise_key
        self._place: OnePlace | None = None
        self.clients = Clients(
            method,
            self.kit,
            [client],
            self.ledger,
            silo.noise,
            silo.files.clients,
            watch=self.watch,
            rows=None if self._all_sent else self._rows(silo.noise),
        )
        reserved = client.rounds
        self.withdrawn.as_reserved(max(reserved, default=-1) + 1, reserved)  # says now what does not fit the table
        self.secure: SecureSilo | None = None
        if self.terms.secure:
            from modicum.deploy.silo.secure import SecureSilo

            self.secure = SecureSilo(agreement.secure(), silo.spec, client.rounds)

    @property
    def _all_sent(self) -> bool:
        """Whether everything that was planned is reserved, computed and stored: no noise is drawn any more."""
        return self.ledger.share_reserved() >= 1 and not self.ledger.unsettled()

    def _rows(self, noise: NoiseSource) -> NoiseSource | None:
        begun = self.ledger.share_reserved() > 0
        rows = own_rows_source([self.plan], noise, self._key, begun=begun)
        if self._key.exists():
            self._place = place_of(self._key, self.ledger, begun=begun)
        return rows

    def close(self) -> None:
        """Let go of the ledger, and of the protocol's store where there is one."""
        self.ledger.close()
        if self.secure is not None:
            self.secure.close()

    def finish(self) -> None:
        """The run is over: its noise cannot be drawn again."""
        self._end_noise()
        if self.secure is not None:
            self.secure.finish()
            self.clients.acknowledge(self.terms.config.run.rounds)

    def answer(self, b: Broadcast) -> bytes:
        """The message to a proposal, where anybody may see it."""
        if self.secure is not None:
            raise Refuse(Code.WEAKER_VIEW)  # a summand holds only its share of noise
        self._check(b)
        return encode(self._message(b))

    def step(self, kind: Kind, round: int, request: bytes, b: Broadcast | None) -> bytes:
        """One step of secure aggregation. An input is charged, computed and stored before it is masked."""
        if self.secure is None:
            raise Refuse(Code.MALFORMED)
        if b is not None:
            self._check(b)
            if b.round != round or b.metrics != self.secure.terms.due(round):
                raise Refuse(Code.MALFORMED)
        message = self.secure.answer(kind, round, request, lambda: self._integers(b))
        if (
            kind is Kind.MASKED
        ):  # on disk; what is under the masks has its own share of noise only: no ledger keeps it
            self.clients.acknowledge(round + 1)
        return message

    def _integers(self, b: Broadcast | None) -> Integers:
        message = None if b is None else self._message(b)
        assert isinstance(message, Summand)
        found: Integers = message.update.numpy()
        return found

    def _message(self, b: Broadcast) -> Message:
        """Drawn, charged, computed, settled: it may leave in the way that the view allows."""
        self._draw()
        charged = self.ledger.releases_made(self.name)
        client = self.clients.clients[self.name]
        client.records, client.validation = self.withdrawn.as_reserved(b.round, client.rounds)
        try:
            answer = self._ask(b, self.kit)
        except Exception:  # what failed may depend on the records, so the message must not
            LOG.exception("round %d cannot be computed: zero plus noise is sent, and charged", b.round + 1)
            answer = self._ask(b, replace(self.kit, backend=Zero(self.kit.backend.layout)))
        if isinstance(answer, Refusal):
            why = self.watch.refused or answer.detail or answer.reason
            LOG.warning("round %d is refused: %s", b.round + 1, why)
            raise Refuse(self.watch.refused or FROM_LEDGER.get(answer.reason, Code.NOT_PLANNED))
        self.account.remember(self.ledger)
        if self._place is not None:
            self._place.note(self.ledger.head())
        if self._all_sent:
            self._end_noise()
        self._tell(b, charged)
        # The server proposes a round only after it has stored all earlier ones.
        self.clients.acknowledge(b.round)
        return answer

    def _end_noise(self) -> None:
        if self._place is not None:
            self._place.end()
        destroy_key(self._key)

    def _draw(self) -> None:
        """From its first reservation on, the run has drawn on the account whatever becomes of it."""
        try:
            self.account.draw(self.join.run)
        except DrawRefused as lapsed:
            LOG.warning("%s", lapsed)
            raise Refuse(Code.BUDGET) from None

    def _tell(self, b: Broadcast, before: int) -> None:
        """One line for the operator: what was asked, charged, and is left; all of it public values."""
        charged, left = self.ledger.releases_made(self.name) - before, self.ledger.left()[self.name]
        what = f"charged {counted(charged, 'release')}" if charged else "sent again, nothing charged"
        LOG.info(
            "round %d of %d: asked for bound %.4g; %s; %.0f%% of the plan for ε = %s is left",
            *(b.round + 1, self.terms.config.run.rounds, b.decision.bound),
            *(what, 100 * left, shown(self.ledger.reported(self.name))),
        )

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

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        return torch.zeros_like(theta)

    def clipped_sums(
        self,
        theta: Tensor,
        batches: Sequence[Batch],
        losses: Losses,
        clips: Sequence[Clip],
    ) -> tuple[Tensor, list[Tensor]]:
        return torch.zeros_like(theta), [theta.new_zeros(len(batch)) for batch in batches]


class Careful:
    """A backend whose failed steps count as zero.

    A round that is begun again after a failure has other noise, so that a policy which decides before each step
    asks for something else than was reserved and is stopped: the length of the update would tell of the failure.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._zero = backend, Zero(backend.layout)
        self.layout = backend.layout
        self.model = getattr(backend, "model", None)  # whose layers some defences look at

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return self._backend.outputs(theta, x)

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        return self._backend.gradients(theta, batches, losses)

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        try:
            return self._backend.clipped_sums(theta, batches, losses, clips)
        except Exception:
            LOG.exception("a step cannot be computed: it counts as zero, with its noise")
            return self._zero.clipped_sums(theta, batches, losses, clips)
