"""A silo inside one run: its ledger, its plan, and the client side that every engine shares."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modicum.compute.loop import LoopBackend
from modicum.core.layout import Layout
from modicum.core.messages import Broadcast, encode, finite
from modicum.core.parts import Batch, ClipRule, Frame, Losses
from modicum.deploy.silo.grant import GrantWatch, objection, too_much, within
from modicum.deploy.silo.terms import Join, Terms
from modicum.deploy.silo.wire import Code, Refuse
from modicum.errors import UserError
from modicum.federation.clients import Answer as Answered
from modicum.federation.clients import Client, Clients
from modicum.federation.experiment import prepare
from modicum.federation.foreign import foreign_parts
from modicum.federation.setup import first_state, make_frame
from modicum.privacy.budgets import Reason, Refusal

if TYPE_CHECKING:
    from modicum.deploy.silo.silo import Silo

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


class TakingPart:
    """A silo inside one run: its ledger, its plan and the client side that every engine shares."""

    def __init__(self, silo: Silo, join: Join) -> None:
        self.join, self.grant, self.name = join, silo.spec.grant, silo.spec.name
        self.terms = Terms(silo.spec.experiment, join.names)
        facts = join.facts[join.names.index(self.name)]
        self.plan = self.terms.plan(facts)
        if not within(self.plan, self.grant):
            raise UserError(too_much(self.terms, self.plan, self.grant))
        method = self.terms.method
        data = prepare(silo.experiment, method)
        backend = LoopBackend(data.model)
        self.frame = make_frame(
            silo.experiment, method, data, backend, join.facts, join.multipliers, join.adaptive
        )
        self.account = silo.account
        self.account.draw(join, self.plan)
        foreign = foreign_parts(silo.spec.experiment.method, method, data.model)
        self.ledger = silo.files.open_ledger(join.run, silo.noise, foreign_parts=foreign)
        self.ledger.declare([self.plan])
        self.account.remember(self.ledger)
        self.dtype = data.first.dtype
        self.model_bytes = int(self.frame.shared.sum()) * data.first.element_size()
        client = Client(facts, self.plan, data.records[0], data.validation[0], first_state(data, self.frame))
        self.watch = GrantWatch(self.grant, method.mechanism.purpose)
        self.clients = Clients(
            method, self.frame, [client], self.ledger, silo.noise, silo.files.clients, watch=self.watch
        )

    def answer(self, b: Broadcast) -> bytes:
        self._check(b)
        try:
            answer = self._ask(b, self.frame)
        except Exception:  # what failed may depend on the records, so the message must not
            LOG.exception("round %d cannot be computed: zero plus noise is sent, and charged", b.round)
            answer = self._ask(b, replace(self.frame, backend=Zero(self.frame.backend.layout)))
        if isinstance(answer, Refusal):
            LOG.warning("round %d is refused: %s", b.round, self.watch.refused or answer.detail or answer.reason)
            raise Refuse(self.watch.refused or FROM_LEDGER.get(answer.reason, Code.NOT_PLANNED))
        self.account.remember(self.ledger)
        # The server proposes a round only after it has stored all earlier ones.
        self.clients.acknowledge(b.round)
        return encode(answer)

    def _ask(self, b: Broadcast, frame: Frame) -> Answered:
        self.clients.frame, self.watch.refused = frame, None
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
        if b.model.numel() != int(self.frame.shared.sum()) or b.model.dtype != self.dtype or not finite(b.model):
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
