"""No privacy: updates are sent as they are, and the ledger says ε = ∞."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from modicum.core.extension_points import Transform
from modicum.core.facts import ClientFacts
from modicum.core.messages import Expected, Message, Noised, NoiseFacts
from modicum.core.needs import Need
from modicum.core.parts import Asked, ClientKit, Job, State
from modicum.core.round_state import Collector, RoundState
from modicum.mechanisms import common
from modicum.privacy.events import Block, Release
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, ServerSeesMessages, Unit
from modicum.training.local_steps import LocalSteps, train_locally

UPDATE = "update"


@dataclass(frozen=True, kw_only=True)
class Clear:
    """The reference without privacy. Each message is still reserved and settled, at a price of ε = ∞."""

    local: LocalSteps = field(default_factory=LocalSteps)
    transform: Transform | None = None  # of each client's update, before it is sent
    individuals = True
    offers: ClassVar[tuple[Need, ...]] = ()
    purpose = UPDATE

    @property
    def spec(self) -> PrivacySpec:
        """The view is that of messages; no ε is claimed for it."""
        return PrivacySpec(unit=Unit.CLIENT, view=ServerSeesMessages())

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=math.inf, guard=Guard.NONE)

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        update = common.once(asked, self.spec, (Block(UPDATE, 1.0, 0.0),))
        return (update, *common.metric_events(self.spec, asked, kit.metrics))

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        """Nothing is clipped, so that any finite update is possible: only a robust aggregation bounds it."""
        _, *metrics = self.events(asked, kit)
        rates = common.expected_metrics(metrics, self.spec.unit, asked.facts.validation)
        return Expected(NoiseFacts(0.0, 1.0), metrics=rates)

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        first = common.starts(jobs, kit)
        results: list[tuple[Message, State]] = []
        for job, initial, last in zip(jobs, first, train_locally(jobs, first, kit, self.local), strict=True):
            event = self.events(job, kit)[0]
            moved = self._moved(job, kit, initial, last)
            update = common.transformed(common.shared_part(moved, job, kit)[None], self.transform)[0]
            update = job.gate.release(event, 0, {UPDATE: update})[UPDATE]
            metrics = common.released_metrics(job, kit, self.spec)
            message = Noised(job.facts.name, job.broadcast.round, update, {}, metrics)
            results.append((message, common.keep_personal(job, kit, last)))
        return results

    def _moved(self, job: Job, kit: ClientKit, initial: Tensor, last: Tensor) -> Tensor:
        """What is sent of the local training: all that it moved. A defence without guarantee sends less."""
        return last - initial

    def collect(self, state: RoundState) -> Collector:
        return common.Individually(state)
