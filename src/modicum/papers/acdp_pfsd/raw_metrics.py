"""Noised updates beside figures in the clear: what ACDP-pFSD prints, kept for faithful mode. ε = ∞."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, tensor
from torch.nn.functional import cross_entropy

from modicum.core.facts import ClientFacts
from modicum.core.messages import Decision, Expected, Message, Noised, NoisedNumber
from modicum.core.needs import Need
from modicum.core.parts import PERSONALISED, Asked, ClientKit, Job, State
from modicum.core.round_state import Collector, RoundState
from modicum.mechanisms import common
from modicum.mechanisms.client_level import UPDATE, ClientLevel
from modicum.privacy.events import Block, Release
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec

RAW = "raw-accuracy-and-loss"
WORST = 1e6  # a model that diverged has some loss, not an infinite one


@dataclass(frozen=True)
class RawMetrics:
    """Client-level noise on updates, and each client's accuracy and loss without any.

    The updates' noise is worth something, the whole release is not: nobody is promised anything, and the ledger
    lists the figures as a block with noise multiplier 0. Figures are taken on the client's validation records; the
    paper takes them on the test records that it reports later.
    """

    inner: ClientLevel
    noise_multiplier: float  # of one client's message
    tested: Literal["noised", "personalised"] = "noised"  # Alg. 2, lines 19–20 say noised, the text personalised

    purpose = UPDATE
    needs = (Need.CLASSES,)
    individuals = True

    @property
    def offers(self) -> tuple[Need, ...]:
        """What the inner mechanism offers."""
        return self.inner.offers

    @property
    def spec(self) -> PrivacySpec:
        return self.inner.spec

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=math.inf, guard=Guard.NONE)

    def decisions(self, chosen: Mapping[str, Decision], multipliers: Mapping[str, float]) -> dict[str, Decision]:
        return {name: replace(d, noise_multiplier=self.noise_multiplier) for name, d in chosen.items()}

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        return (*self.inner.events(asked, kit), self._figures(asked))

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        inner = self.inner.expected(asked, kit)
        return replace(
            inner, metrics={"accuracy": NoisedNumber(0.5, 0.5), "loss": NoisedNumber(WORST / 2, WORST / 2)}
        )

    def _figures(self, asked: Asked) -> Release:
        return common.once(asked, self.spec, (Block(RAW, 1.0, 0.0),))

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        results: list[tuple[Message, State]] = []
        for job, (message, state) in zip(jobs, self.inner.run(jobs, kit), strict=True):
            assert isinstance(message, Noised)
            private = {RAW: self._test(job, kit, message, state)}
            sent = job.gate.release(self._figures(job), 0, private)[RAW]
            accuracy, loss = sent.tolist()
            results.append((replace(message, metrics={"accuracy": accuracy, "loss": loss}), state))
        return results

    def _test(self, job: Job, kit: ClientKit, message: Noised, state: State) -> Tensor:
        theta = state[PERSONALISED]
        if self.tested == "noised":
            theta = theta.clone()
            theta[kit.shared] = job.broadcast.model + message.update
        held_out = job.validation if len(job.validation) else job.records
        outputs, y = kit.backend.outputs(theta, held_out.x), held_out.targets["y"]
        accuracy = (outputs.argmax(-1) == y).double().mean().item()
        loss = cross_entropy(outputs.double(), y).nan_to_num(nan=WORST, posinf=WORST).item()
        return tensor([accuracy, min(loss, WORST)], dtype=outputs.dtype)

    def collect(self, state: RoundState) -> Collector:
        return self.inner.collect(state)
