"""Record-level privacy behind secure aggregation: one step a round on all clients' records, one noise for the sum.

Each client sends the sum of its clipped gradients as integers with its share of noise. Only the sum over all of
them is seen, so the noise is that of a server which holds all records, and not √N times as much (R12, R13). Each
round is one step of the optimiser, taken by the server on the mean gradient: a function of what was released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch

from modicum.core.clips import Clip, Flat
from modicum.core.extension_points import ProximalTerm
from modicum.core.facts import ClientFacts
from modicum.core.messages import Expected, Message, NoiseFacts, ReleasedSum
from modicum.core.needs import Need
from modicum.core.optimisers import Optimiser
from modicum.core.parts import Asked, ClientKit, Job, State
from modicum.core.release_gate import ReleaseRequest
from modicum.core.round_state import Collector, RoundState
from modicum.errors import UserError
from modicum.mechanisms import common, integers
from modicum.mechanisms.record_local import GRADIENT
from modicum.privacy.events import Origin, Release
from modicum.privacy.noise.choose import schedule_for
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit
from modicum.privacy.views import SecureAggregation, Variant, View


@dataclass(frozen=True, kw_only=True)
class RecordSums:
    """The mean gradient over all clients' records, each clipped at the bound that its client was told.

    A client whose budget asks for more noise than the least of them counts less: its part is scaled down (R13).
    """

    view: View
    optimiser: Optimiser
    adjacency: Adjacency = Adjacency.ZERO_OUT
    delta: float = 1e-5
    rule: Clip = field(default_factory=Flat)  # how a record is clipped; the policy's bound scales it
    noise_multiplier: float | None = None  # in the sum; None: calibrated to each client's budget
    unit: Unit = field(default=Unit.RECORD, repr=False)  # persons where the experiment's records are

    individuals = False
    integers = True
    takes_integers = True
    purpose = GRADIENT
    offers: ClassVar[tuple[Need, ...]] = (Need.SIGNALS, Need.OWN_BOUNDS, Need.LAYERS)

    def __post_init__(self) -> None:
        schedule_for(self.noise_multiplier, integers=True)  # refuses what cannot be
        if not isinstance(self.view, SecureAggregation):
            raise UserError("sums of records need the view secure-aggregation")

    @cached_property
    def spec(self) -> PrivacySpec:
        return PrivacySpec(unit=self.unit, adjacency=self.adjacency, view=self.view, delta=self.delta)

    def on_integers(self, variant: Variant) -> RecordSums:
        return replace(self, view=integers.behind(self.view, variant))

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        schedule = schedule_for(self.noise_multiplier, integers=True)
        return schedule.agree(common.once_a_round(facts, self.spec, GRADIENT), metrics)

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        return (self._event(asked, kit), *common.metric_events(self.spec, asked, kit.metrics))

    def _event(self, asked: Asked, kit: ClientKit) -> Release:
        plan, bound = asked.plan, common.moved(asked.broadcast.decision, self.rule)
        blocks = common.query(GRADIENT, bound, plan.multiplier(GRADIENT), kit.policy.signals)
        return common.once(asked, self.spec, blocks, plan.integers(GRADIENT), Origin.RELEASED)

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        return integers.nothing_seen(self.events(asked, kit)[0])

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        if isinstance(kit.training, ProximalTerm):
            raise UserError(
                "a pull towards the server's model acts between local steps, and here each round is one"
            )
        theta, clips = common.starts(jobs, kit), [job.broadcast.decision.rule(self.rule) for job in jobs]
        batches = [
            job.records.with_targets(kit.training.targets(job.records, job.state, kit.backend)) for job in jobs
        ]
        sums, norms = kit.backend.clipped_sums(theta, batches, kit.training.losses, clips)
        norms = [own if b.present is None else own[b.present] for own, b in zip(norms, batches, strict=True)]
        done: list[tuple[Message, State]] = []
        for job, total, norm, start in zip(jobs, sums.unbind(), common.on_cpu(norms), theta, strict=True):
            request = self._request(job, kit, common.shared_part(total, job, kit), norm)
            requests = [request, *common.metric_requests(job, kit, self.spec)]
            done.append((integers.summand(requests), common.keep_personal(job, kit, start)))
        return done

    def _request(self, job: Job, kit: ClientKit, total: torch.Tensor, norms: torch.Tensor) -> ReleaseRequest:
        signals = common.contributions(norms, job.broadcast.decision.bound, kit.policy.signals)
        event = self._event(job, kit)
        return ReleaseRequest(job.gate, event, 0, {GRADIENT: total, **signals})

    def collect(self, state: RoundState) -> Collector:
        raise integers.not_collected()

    def open_integers(self, total: Integers, survivors: Sequence[str], state: RoundState) -> ReleasedSum | None:
        """The step that the mean gradient makes; what is known of its noise goes through the same step."""
        opened = integers.open_sum(total, survivors, state)
        if opened is None:
            return None
        update = torch.zeros_like(opened.update)[None]
        buffers = [torch.zeros_like(update) for _ in range(self.optimiser.slots)]
        self.optimiser.step(update, opened.update[None], buffers, 0)
        gain, spread = self.optimiser.gains(1)
        facts = NoiseFacts(opened.facts.variance * spread, gain, opened.facts.signal_variance)
        return replace(opened, update=update[0], facts=facts)
