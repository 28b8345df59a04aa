"""Record-level privacy made by each client for itself: secret Poisson batches, per-example clipping, noise.

Every local step is one release. What is sent is the local model after the last step, a function of those
releases; the server and all others may see it (R1, R4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from modicum.core.clips import Clip, Flat
from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Decision, Expected, Message, NoiseFacts, Range
from modicum.core.needs import Need
from modicum.core.parts import ClientKit, Job, Scope, State
from modicum.core.round_state import Collector, RoundState
from modicum.core.sockets import Climbs, Pulls
from modicum.core.stack import Pool
from modicum.errors import UserError, counted
from modicum.mechanisms import common, integers
from modicum.mechanisms.fixed_shapes import FixedShapes
from modicum.mechanisms.passes import clipped_in_passes
from modicum.mechanisms.possible import DOUBT, ROUNDING, around, most_drawn, noise_norm, rounded_away, spread
from modicum.mechanisms.record_steps import Stepper, release, uphill
from modicum.privacy.accounting.calibration import calibrate_kinds, calibrate_noise, largest_steps
from modicum.privacy.accounting.filters import filter_cap, price
from modicum.privacy.accounting.rdp import best_order
from modicum.privacy.events import NoSampling, Origin, Poisson, Release, Sampler
from modicum.privacy.noise.stock import Stock, filtered_noise
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, ServerSeesMessages, Unit
from modicum.privacy.views import KnownTo, Variant
from modicum.training.descent import Descent

GRADIENT = "gradient"
MOST_EPOCHS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RecordLocal:
    """DP-SGD inside each client."""

    batch: int | None = None  # expected batch size; None: all records in every step
    epochs: float = 1.0  # local epochs a participation
    steps: int | None = None  # local steps a participation; overrides epochs
    adjacency: Adjacency = Adjacency.ZERO_OUT
    delta: float = 1e-5
    rule: Clip = field(default_factory=Flat)  # how a record is clipped; the policy's bound scales it
    noise_multiplier: float | None = None  # None: calibrated to each client's budget
    adaptive: bool = False  # the policy chooses the noise of each step, and a filter guards the budget (R2)
    integers: bool = False  # noise is drawn on a lattice: whole batches, and noise that the plan fixes (R12)
    normalised: bool = False  # steps go by gradients in units of their bound, so that C changes no step's length
    shapes: FixedShapes | None = None  # of passes over drawn records, where a server may be hostile; None: ragged
    stock: Stock | None = None  # kinds of noise to choose from: in the plan (R11), or before a filter (`adaptive`)

    individuals = True
    purpose = GRADIENT
    cohort_rate = None

    def __post_init__(self) -> None:
        common.check_noise(self.noise_multiplier)
        if self.batch is not None and self.batch < 1:
            raise UserError(f"the batch size must be at least 1, got {self.batch}")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"local steps must be at least 1, got {self.steps}")
        if not 0 < self.epochs <= MOST_EPOCHS:
            raise UserError(f"local epochs must be positive and at most {MOST_EPOCHS:,}, got {self.epochs}")
        if self.stock is not None and self.noise_multiplier is not None:
            raise UserError("noise comes from a stock or is set, not both: leave out one of them")
        if self.stock is not None and self.integers:
            raise UserError("noise on a lattice has one kind: leave out integers or the stock")

    @property
    def offers(self) -> tuple[Need, ...]:
        """Clipping signals, steps, bounds by layer, and noise that adapts or comes in kinds where asked to."""
        noise = [Need.ADAPTIVE_NOISE] * self.adaptive + [Need.KINDS] * (self.stock is not None)
        return (Need.SIGNALS, Need.STEPS, Need.LAYERS, *noise)

    @property
    def spec(self) -> PrivacySpec:
        return PrivacySpec(unit=Unit.RECORD, adjacency=self.adjacency, view=ServerSeesMessages(), delta=self.delta)

    @property
    def takes_integers(self) -> bool:
        return self.batch is None and not self.adaptive and self.stock is None

    def on_integers(self, variant: Variant) -> RecordLocal:
        integers.behind(self.spec.view, variant)
        return replace(self, integers=True)

    def sampler(self, facts: ClientFacts) -> Sampler:
        """Who enters a step, and in what passes if their shapes are to tell nobody who was drawn (R16)."""
        sampler = self._drawn_from(facts)
        if self.shapes is None or not isinstance(sampler, Poisson):
            return sampler
        steps = None if self.adaptive else self.total_steps(facts)  # a filter does not know them
        return replace(sampler, shape=self.shapes.choose(facts.records, sampler.rate, self.delta, steps))

    def _drawn_from(self, facts: ClientFacts) -> Sampler:
        """Poisson sampling at rate batch/records, or all records in each step; a batch above them is refused."""
        if self.batch is None or self.batch == facts.records:
            return NoSampling()
        if self.batch > facts.records:
            raise UserError(
                f"client {facts.name!r} has {counted(facts.records, 'record')}, fewer than the batch of "
                f"{self.batch}: lower the batch size or leave it out for whole batches"
            )
        return Poisson(self.batch / facts.records, KnownTo.CLIENT)

    def expected_batch(self, facts: ClientFacts) -> float:
        """What sums of gradients are divided by: the public batch size, never the drawn one (R4)."""
        return float(self.batch or facts.records)

    def total_steps(self, facts: ClientFacts) -> int:
        """K_i = round(epochs · participations · n_i / B), fixed before training (R4)."""
        if self.steps is not None:
            return self.steps * facts.participations
        passes = self.epochs * facts.records / self.expected_batch(facts)
        if self.stock is not None:  # every kind of noise fits every participation
            return max(1, round(passes)) * facts.participations
        return max(facts.participations, round(passes * facts.participations))

    def steps_in(self, facts: ClientFacts, participation: int) -> int:
        """Local steps of one participation: K_i spread evenly, none lost to rounding."""
        total, parts = self.total_steps(facts), facts.participations
        return (participation + 1) * total // parts - participation * total // parts

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        if math.isinf(facts.budget):
            return PrivacyPlan(client=facts.name, spec=self.spec, budget=math.inf, guard=Guard.NONE)
        sampler, count = self.sampler(facts), self.total_steps(facts)
        if self.adaptive:
            return self._filter_plan(facts, sampler, count, metrics)
        if self.stock is not None:
            return self._stock_plan(facts, self.stock, metrics)
        exact = integers.priced(self.spec, integers=self.integers)
        if self.noise_multiplier is None:
            z = calibrate_noise(exact, facts.budget, sampler, count, also=metrics)
        else:
            z = self.noise_multiplier
            count = min(count, largest_steps(exact, facts.budget, sampler, z, also=metrics))
        releases = (PlannedRelease(GRADIENT, z, sampler, count), *metrics)
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=facts.budget, releases=releases)

    def _filter_plan(
        self, facts: ClientFacts, sampler: Sampler, count: int, metrics: tuple[PlannedRelease, ...]
    ) -> PrivacyPlan:
        """Under sampling one order α* is fixed now: the best for the planned steps at one constant noise (R2)."""
        order = None
        if isinstance(sampler, Poisson):
            z = calibrate_noise(self.spec, facts.budget, sampler, count, also=metrics)
            order = best_order(sampler.rate, self.spec.charged(z), count, self.delta)
        return PrivacyPlan(
            client=facts.name,
            spec=self.spec,
            budget=facts.budget,
            guard=Guard.GDP_FILTER if order is None else Guard.RDP_FILTER,
            order=order,
        )

    def _stock_plan(self, facts: ClientFacts, stock: Stock, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        """All kinds together cost the budget, whatever their order (R11)."""
        kinds = stock.kinds(facts.participations, self.steps_in(facts, 0))
        sampler = self.sampler(facts)
        z = calibrate_kinds(self.spec, facts.budget, sampler, kinds, also=metrics)
        releases = tuple(PlannedRelease(GRADIENT, s * z, sampler, n) for s, n in kinds)
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=facts.budget, releases=(*releases, *metrics))

    def kinds(self, facts: ClientFacts) -> tuple[float, ...]:
        """Participations of each kind that the plan holds, or that a filter would let through of it alone."""
        if self.stock is None or math.isinf(facts.budget):
            return ()
        if not self.adaptive:
            return self.stock.participations(facts.participations)
        plan, steps, sampler = self.plan(facts, ()), self.steps_in(facts, 0), self.sampler(facts)
        z, cap = self._filtered(facts, plan), filter_cap(plan)
        return tuple(cap / price(plan, scale * z, sampler, steps) for scale in self.stock.scales)

    def _filtered(self, facts: ClientFacts, plan: PrivacyPlan) -> float:
        """z of the constant noise that a client's filter lets through to the end; kinds are multiples of it."""
        sampler = self.sampler(facts)
        rate = sampler.rate if isinstance(sampler, Poisson) else 1.0
        moves = self.adjacency.moves
        return filtered_noise(filter_cap(plan), plan.order, rate, moves, self.total_steps(facts))

    def _noise(
        self, facts: ClientFacts, plan: PrivacyPlan, broadcast: Broadcast, decision: Decision, participation: int
    ) -> tuple[float, Origin]:
        """This participation's noise multiplier, and where it comes from."""
        del broadcast  # whose round decides where noise falls in stages
        if integers.planned(plan, GRADIENT) is not None:  # on a lattice the plan fixes it
            return common.training_multiplier(plan, GRADIENT), Origin.PRESET
        if decision.noise_multiplier is not None:
            return decision.noise_multiplier, Origin.RELEASED
        if self.stock is None or plan.guard is Guard.NONE:
            return common.training_multiplier(plan, GRADIENT), Origin.PRESET
        kind, origin = decision.kind, Origin.PLANNED
        if kind is None:
            kind, origin = self.stock.in_turn(facts.participations, participation), Origin.PRESET
        return self.noise_of_kind(facts, plan, kind), Origin.RELEASED if self.adaptive else origin

    def noise_of_kind(self, facts: ClientFacts, plan: PrivacyPlan, kind: int) -> float:
        """The multiplier of one of a client's kinds of noise; of its only one where there is no stock."""
        if self.stock is None or plan.guard is Guard.NONE:
            return common.training_multiplier(plan, GRADIENT)
        if self.adaptive:
            return self.stock.scales[kind] * self._filtered(facts, plan)
        return plan.releases[kind].noise_multiplier

    def decisions(self, chosen: Mapping[str, Decision], multipliers: Mapping[str, float]) -> dict[str, Decision]:  # noqa: ARG002
        return dict(chosen)

    def events(
        self, facts: ClientFacts, plan: PrivacyPlan, kit: ClientKit, broadcast: Broadcast, participation: int
    ) -> tuple[Release, ...]:
        metrics = common.metric_events(self.spec, broadcast, kit.metrics, plan)
        if kit.policy.scope is Scope.STEP:
            return metrics  # each step is reserved by itself, once its noise is known
        count = self.steps_in(facts, participation)
        noise = self._noise(facts, plan, broadcast, broadcast.decision, participation)
        return (self._event(facts, plan, kit, broadcast, broadcast.decision, noise, 0, count), *metrics)

    def _event(
        self,
        facts: ClientFacts,
        plan: PrivacyPlan,
        kit: ClientKit,
        broadcast: Broadcast,
        decision: Decision,
        noise: tuple[float, Origin],
        step: int,
        count: int,
    ) -> Release:
        z, origin = noise
        return Release(
            client=facts.name,
            round=broadcast.round,
            step=step,
            count=count,
            spec=self.spec,
            blocks=common.query(GRADIENT, decision.bound, z, kit.policy.signals),
            sampler=self.sampler(facts),
            bound_origin=Origin.RELEASED,
            noise_origin=origin,
            integers=integers.planned(plan, GRADIENT),
        )

    def step_event(self, job: Job, kit: ClientKit, decision: Decision, step: int, count: int) -> Release:
        """What a job releases in so many steps from this one on, by a decision that may be the client's own."""
        noise = self._noise(job.facts, job.plan, job.broadcast, decision, job.participation)
        return self._event(job.facts, job.plan, kit, job.broadcast, decision, noise, step, count)

    def expected(
        self, facts: ClientFacts, plan: PrivacyPlan, kit: ClientKit, broadcast: Broadcast, participation: int
    ) -> Expected:
        """Each step's clipped mean is at most C·b/B for b records drawn where B are expected; noise adds up.

        A client that missed a proposal counts its participations otherwise than the server, so that one of its
        rounds may be a step longer or shorter than the server thinks. Where a client decides before each step, its
        bounds and noise are unknown here: facts are those of the first decision, and only finiteness is checked.
        Nor is it known how far a pull of the training reaches: facts leave it out.
        """
        count = self.steps_in(facts, participation)
        noise = self._noise(facts, plan, broadcast, broadcast.decision, participation)
        event = self._event(facts, plan, kit, broadcast, broadcast.decision, noise, 0, count)
        metrics = common.metric_events(self.spec, broadcast, kit.metrics, plan)
        known = self.facts_of(event, facts, count, kit.training.optimiser.gains(count))
        doubt = DOUBT / (2 + len(event.blocks) - 1 + len(metrics))
        rates = common.expected_metrics(metrics, Unit.RECORD, facts.validation, doubt)
        if kit.policy.scope is Scope.STEP:
            unknown = (-math.inf, math.inf)
            return Expected(known, math.inf, {b.name: unknown for b in event.blocks[1:]}, rates)
        norm, signals = self._reach(event, facts, kit, broadcast.model, doubt)
        return Expected(known, math.inf if isinstance(kit.training, Pulls) else norm, signals, rates)

    def _reach(
        self, event: Release, facts: ClientFacts, kit: ClientKit, model: Tensor, doubt: float
    ) -> tuple[float, dict[str, Range]]:
        """The update's largest norm and the signals' ranges: this doubt for each, and once for all batches."""
        dimension = model.numel()
        total, parts, over = self.total_steps(facts), facts.participations, self.expected_batch(facts)
        most, least = -(-total // parts), max(1, total // parts)
        main, *signals = event.blocks
        share = most_drawn(facts.records, event.sampler, doubt / most) / over
        unit = self.unit_of(main.bound)
        noise = main.noise_std / unit / over * noise_norm(dimension, doubt)
        norm = kit.training.optimiser.farthest(most, main.bound / unit * share, noise, dimension)
        reach = {b.name: b.bound * share + spread(doubt) * b.noise_std / over / math.sqrt(least) for b in signals}
        norm = norm * (1 + ROUNDING) + rounded_away(model, most, norm)
        return norm, {name: around(0.5, r) for name, r in reach.items()}

    def facts_of(
        self, event: Release, facts: ClientFacts, steps: int, gains: tuple[float, float] = (1.0, 1.0)
    ) -> NoiseFacts:
        """The noise in an update made of `steps` releases like this one, or in one of them alone."""
        gain, spread_out = gains
        main, *signals = ((b.name, (b.noise_std / self.expected_batch(facts)) ** 2) for b in event.blocks)
        unit = self.unit_of(event.blocks[0].bound)
        variance = main[1] * spread_out / unit**2
        return NoiseFacts(variance, gain / unit, {name: own / steps for name, own in signals})

    def unit_of(self, bound: float) -> float:
        """What a released gradient is divided by before a step goes by it: public, so post-processing."""
        return bound if self.normalised else 1.0

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        # Longest first, so that the clients still at work are always the first rows of the stack.
        order = sorted(range(len(jobs)), key=lambda i: -self._steps(jobs[i]))
        done = self._run_sorted([jobs[i] for i in order], kit)
        return [result for _, result in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]

    def _steps(self, job: Job) -> int:
        return self.steps_in(job.facts, job.participation)

    def _run_sorted(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        first = common.starts(jobs, kit)
        steppers = [Stepper(self, job, kit) for job in jobs]
        pool = Pool([stepper.records for stepper in steppers])
        descent = Descent(first, kit.training.optimiser, kit.training)  # its pull comes after the noise
        theta = descent.theta
        released = torch.zeros_like(theta)[: len(theta) if isinstance(kit.training, Climbs) else 0]
        for step in range(steppers[0].steps):
            active = [stepper for stepper in steppers if step < stepper.steps]
            for stepper, row in zip(active, theta, strict=False):
                stepper.decide(step, row)
            where = uphill(theta[: len(active)], released, kit)
            gradient = self._noised_gradients(active, pool, where, kit, step)
            if isinstance(kit.training, Climbs):
                released[: len(active)] = gradient
            descent.step(step, gradient)
        return [
            stepper.result(initial, last) for stepper, initial, last in zip(steppers, first, theta, strict=True)
        ]

    def _noised_gradients(
        self, steppers: Sequence[Stepper], pool: Pool, theta: Tensor, kit: ClientKit, step: int
    ) -> Tensor:
        sums, norms = self._clipped_sums(steppers, pool, theta, kit, step)
        live = [i for i, stepper in enumerate(steppers) if stepper.stopped is None]
        if len(live) == len(steppers):
            return release(steppers, step, sums, norms)
        gradients = torch.zeros_like(sums)
        if live:
            gradients[live] = release([steppers[i] for i in live], step, sums[live], [norms[i] for i in live])
        return gradients

    def _clipped_sums(
        self, steppers: Sequence[Stepper], pool: Pool, theta: Tensor, kit: ClientKit, step: int
    ) -> tuple[Tensor, list[Tensor]]:
        chosen = [stepper.chosen(step) for stepper in steppers]
        clips = [stepper.decision.rule(self.rule) for stepper in steppers]
        if all(stepper.shape is None for stepper in steppers):
            batches = pool.batches(chosen)
            sums, norms = kit.backend.clipped_sums(theta, batches, kit.training.losses, clips)
            return sums, [s.real(own, rows) for s, own, rows in zip(steppers, norms, chosen, strict=True)]
        found = [
            clipped_in_passes(kit.backend, row, stepper.records, rows, kit.training.losses, clip, stepper.shape)
            for stepper, row, rows, clip in zip(steppers, theta, chosen, clips, strict=True)
        ]
        return torch.stack([total for total, _ in found]), [norms for _, norms in found]

    def collect(self, state: RoundState) -> Collector:
        return common.Individually(state)
