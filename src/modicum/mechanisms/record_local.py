"""Record-level privacy made by each client for itself: secret Poisson batches, per-example clipping, noise.

Every local step is one release. What is sent is the local model after the last step, a function of those
releases; the server and all others may see it (R1, R4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from modicum.core.clips import Clip, Flat
from modicum.core.extension_points import ProximalTerm, SamPerturbation
from modicum.core.facts import ClientFacts
from modicum.core.messages import (
    ClippedUpdate,
    Decision,
    Expected,
    Message,
    NoisedNumber,
    NoiseFacts,
    Sampled,
)
from modicum.core.needs import Need
from modicum.core.parts import Asked, ClientKit, Job, Scope, Signal, State
from modicum.core.round_state import Collector, RoundState
from modicum.core.stack import Pool
from modicum.errors import UnsoundError, UserError, counted
from modicum.mechanisms import common, integers
from modicum.mechanisms.fixed_shapes import FixedShapes
from modicum.mechanisms.passes import clipped_in_passes
from modicum.mechanisms.record_steps import Stepper, release, uphill
from modicum.privacy.events import Cyclic, NoSampling, Origin, Poisson, Release, Sampler
from modicum.privacy.factors import FactorKind
from modicum.privacy.noise.choose import schedule_for
from modicum.privacy.noise.correlated import CorrelatedSteps
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases
from modicum.privacy.noise.stock import Stock
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
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
    noise: Schedule | None = None  # a schedule of its own, in place of the four settings above
    unit: Unit = field(default=Unit.RECORD, repr=False)  # persons where the experiment's records are

    individuals = True
    purpose = GRADIENT
    plain_batches = (
        False  # said by a subclass whose batches are those of this class, so that they may come in turn
    )

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise UserError(f"the batch size must be at least 1, got {self.batch}")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"local steps must be at least 1, got {self.steps}")
        if not 0 < self.epochs <= MOST_EPOCHS:
            raise UserError(f"local epochs must be positive and at most {MOST_EPOCHS:,}, got {self.epochs}")
        _ = self.schedule  # refuses what cannot be

    @cached_property
    def schedule(self) -> Schedule:
        """How much noise each release carries."""
        return schedule_for(
            self.noise_multiplier,
            adaptive=self.adaptive,
            stock=self.stock,
            integers=self.integers,
            given=self.noise,
        )

    @property
    def offers(self) -> tuple[Need, ...]:
        """Clipping signals, steps, bounds by layer, and noise that adapts or comes in kinds where asked to."""
        noise = [Need.ADAPTIVE_NOISE] * self.schedule.adapts + [Need.KINDS] * bool(self.schedule.scales)
        return (Need.SIGNALS, Need.STEPS, Need.LAYERS, *noise)

    @property
    def spec(self) -> PrivacySpec:
        return PrivacySpec(unit=self.unit, adjacency=self.adjacency, view=ServerSeesMessages(), delta=self.delta)

    @property
    def takes_integers(self) -> bool:
        return self.batch is None and self.schedule.fits_lattice

    def on_integers(self, variant: Variant) -> RecordLocal:
        integers.behind(self.spec.view, variant)
        return replace(self, integers=True)

    def sampler(self, facts: ClientFacts) -> Sampler:
        """Who enters a step, and in what passes if their shapes are to tell nobody who was drawn (R16)."""
        sampler = self._drawn_from(facts)
        if self.shapes is None or not isinstance(sampler, Poisson):
            return sampler
        steps = None if self.schedule.adapts else self.total_steps(facts)  # a filter does not know them
        return replace(sampler, shape=self.shapes.choose(facts.records, sampler.rate, self.delta, steps))

    def _drawn_from(self, facts: ClientFacts) -> Sampler:
        """Poisson sampling at rate batch/records, or all records in each step; a batch above them is refused."""
        if self.batch is None or self.batch == facts.records:
            return NoSampling()
        if self.batch > facts.records:  # also of batches that come in turn
            raise UserError(
                f"client {facts.name!r} has {counted(facts.records, 'record')}, fewer than the batch of "
                f"{self.batch}: lower the batch size or leave it out for whole batches"
            )
        if not self.schedule.in_turn:
            return Poisson(self.batch / facts.records, KnownTo.CLIENT)
        batches = round(facts.records / self.batch)
        return Cyclic(batches) if batches > 1 else NoSampling()

    def expected_batch(self, facts: ClientFacts) -> float:
        """What sums of gradients are divided by: the public batch size, never the drawn one (R4)."""
        if self.schedule.in_turn:  # batches may differ by a record
            return facts.records / self._drawn_from(facts).turns
        return float(self.batch or facts.records)

    def total_steps(self, facts: ClientFacts) -> int:
        """K_i = round(epochs · participations · n_i / B), fixed before training (R4)."""
        if self.steps is not None:
            return self.steps * facts.participations
        passes = self.epochs * facts.records / self.expected_batch(facts)
        if self.schedule.scales:  # every kind of noise fits every participation
            return max(1, round(passes)) * facts.participations
        return max(facts.participations, round(passes * facts.participations))

    def steps_in(self, facts: ClientFacts, participation: int) -> int:
        """Local steps of one participation: K_i spread evenly, none lost to rounding."""
        total, parts = self.total_steps(facts), facts.participations
        return (participation + 1) * total // parts - participation * total // parts

    def steps_before(self, facts: ClientFacts, participation: int) -> int:
        """Local steps of all participations before this one."""
        return participation * self.total_steps(facts) // facts.participations

    def correlate_steps(self, bands: int | None, kind: FactorKind | None, momentum: float) -> Self:
        """The same with batches in turn, and noise that is correlated over all local steps of a run (R19)."""
        if type(self) is not RecordLocal and not self.plain_batches:
            raise UserError(
                f"{type(self).__name__} has batches of its own, which do not come in turn: leave noise out"
            )
        if self.batch is None:
            raise UserError(
                "correlated noise over local steps gains nothing where every record is in every step: set batch, "
                "or leave noise out"
            )
        if self.adjacency is Adjacency.ADD_REMOVE:
            raise UnsoundError(
                "batches that come in turn shift with a record that is missing (R4): use zero-out or replace-one, "
                "or leave noise out"
            )
        if self.adaptive or self.stock is not None or self.integers or self.noise is not None:
            raise UserError(
                "correlated noise over local steps is fixed by the plan (R19): leave out adaptive noise, stocks, "
                "integers and other schedules"
            )
        noise = CorrelatedSteps(bands, kind, momentum, self.noise_multiplier)
        return replace(self, noise=noise, noise_multiplier=None)

    def releases_of(self, facts: ClientFacts) -> TrainingReleases:
        """A client's releases of the whole run, for the schedule to give them noise."""
        return TrainingReleases(
            client=facts.name,
            budget=facts.budget,
            spec=self.spec,
            purpose=GRADIENT,
            sampler=self.sampler(facts),
            steps=self.total_steps(facts),
            participations=facts.participations,
        )

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        return self.schedule.agree(self.releases_of(facts), metrics)

    def kinds(self, facts: ClientFacts) -> tuple[float, ...]:
        """Participations of each kind that the plan holds, or that a filter would let through of it alone."""
        return () if math.isinf(facts.budget) else self.schedule.participations(self.releases_of(facts))

    def noise_of_kind(self, facts: ClientFacts, plan: PrivacyPlan, kind: int) -> float:
        """The multiplier of one of a client's kinds of noise; of its only one where there is no stock."""
        return self.schedule.of_kind(self.releases_of(facts), plan, kind)

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        metrics = common.metric_events(self.spec, asked, kit.metrics)
        if kit.policy.scope is Scope.STEP:
            return metrics  # each step is reserved by itself, once its noise is known
        count = self.steps_in(asked.facts, asked.participation)
        return (self.release(asked, kit.policy.signals, 0, count), *metrics)

    def release(self, asked: Asked, signals: Sequence[Signal], step: int, count: int) -> Release:
        """What a client releases in so many steps from this one on."""
        z, origin = self._noise(asked)
        sampler, terms = self.sampler(asked.facts), asked.plan.correlation(GRADIENT)
        return Release(
            client=asked.facts.name,
            round=asked.broadcast.round,
            step=step,
            count=self.charged(asked.facts, count),
            spec=self.spec,
            blocks=common.query(GRADIENT, self.sensitivity(asked.broadcast.decision), z, signals),
            sampler=sampler,
            bound_origin=Origin.RELEASED,
            noise_origin=origin,
            integers=asked.plan.integers(GRADIENT),
            correlated=None if terms is None else terms.rows,
            first=self.steps_before(asked.facts, asked.participation) + step if sampler.turns > 1 else None,
        )

    def _noise(self, asked: Asked) -> Noise:
        decision = asked.broadcast.decision
        now = Moment(asked.broadcast.round, asked.participation, decision.noise_multiplier, decision.kind)
        return self.schedule.noise(self.releases_of(asked.facts), asked.plan, now)

    def sensitivity(self, decision: Decision) -> float:
        """How far one record moves the clipped sum: as far as its own clipped gradient reaches."""
        return common.moved(decision, self.rule)

    def charged(self, facts: ClientFacts, steps: int) -> int:
        """Releases that so many steps count as."""
        del facts
        return steps

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        """Each step's clipped mean is at most C·b/B for b records drawn where B are expected; noise adds up.

        A client that missed a proposal counts its participations otherwise than the server, so that one of its
        rounds may be a step longer or shorter than the server thinks. Where a client decides before each step, its
        bounds and noise are unknown here: facts are those of the first decision, and only finiteness is checked.
        Nor is it known how far a pull of the training reaches: facts leave it out.
        """
        facts = asked.facts
        count = self.steps_in(facts, asked.participation)
        event = self.release(asked, kit.policy.signals, 0, count)
        metrics = common.metric_events(self.spec, asked, kit.metrics)
        known = self.facts_of(event, facts, count, kit.training.optimiser.gains(count), asked.plan)
        rates = common.expected_metrics(metrics, Unit.RECORD, facts.validation)
        if kit.policy.scope is Scope.STEP:
            unknown = NoisedNumber(0.0, math.inf)
            return Expected(known, None, {b.name: unknown for b in event.blocks[1:]}, rates)
        update, signals = self._made_of(event, facts, kit)
        return Expected(known, None if isinstance(kit.training, ProximalTerm) else update, signals, rates)

    def _made_of(
        self, event: Release, facts: ClientFacts, kit: ClientKit
    ) -> tuple[ClippedUpdate, dict[str, NoisedNumber]]:
        """The update and the signals: as many steps as a round may have, the noise of as few."""
        total, parts, over = self.total_steps(facts), facts.participations, self.expected_batch(facts)
        most, least = -(-total // parts), max(1, total // parts)
        main, *signals = event.blocks
        unit = self.unit_of(main.bound)
        in_a_step = -(-facts.records // event.sampler.turns)  # at most, of those that may be drawn
        sampled = Sampled(in_a_step, event.sampler.chance, over, most)
        loose = self.schedule.most_left(self.releases_of(facts), most)
        std = loose * main.noise_std / unit / over
        update = ClippedUpdate(main.bound / unit, std, most, kit.training.optimiser, sampled)
        averaged = over * math.sqrt(least) / loose
        return update, {b.name: NoisedNumber(0.5, b.bound, b.noise_std / averaged, sampled) for b in signals}

    def facts_of(
        self,
        event: Release,
        facts: ClientFacts,
        steps: int,
        gains: tuple[float, float] = (1.0, 1.0),
        plan: PrivacyPlan | None = None,
    ) -> NoiseFacts:
        """The noise in an update made of `steps` releases like this one, or in one of them alone.

        Correlated noise counts as in a plain sum of the steps; momentum would weigh them otherwise.
        """
        gain, spread_out = gains
        terms = None if plan is None else plan.correlation(GRADIENT)
        mixed = 1.0 if terms is None else terms.spread(event.first_row, steps) / math.sqrt(steps)
        over = self.expected_batch(facts)
        main, *signals = ((b.name, (mixed * b.noise_std / over) ** 2) for b in event.blocks)
        unit = self.unit_of(event.blocks[0].bound)
        variance = main[1] * spread_out / unit**2
        return NoiseFacts(variance, gain / unit, {name: own / steps for name, own in signals})

    def unit_of(self, bound: float) -> float:
        """What a released gradient is divided by before a step goes by it: public, so post-processing."""
        return bound if self.normalised else 1.0

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        # Longest first, so that the clients still at work are always the first rows of the stack.
        order = sorted(range(len(jobs)), key=lambda i: -self._steps(jobs[i]))
        first = common.starts([jobs[i] for i in order], kit)
        steppers = [Stepper(self, jobs[i], kit) for i in order]
        pool = Pool([stepper.records for stepper in steppers])
        descent = Descent(first, kit.training.optimiser, kit.training)  # its pull comes after the noise
        theta = descent.theta
        released = torch.zeros_like(theta)[: len(theta) if isinstance(kit.training, SamPerturbation) else 0]
        for step in range(steppers[0].steps):
            active = [stepper for stepper in steppers if step < stepper.steps]
            for stepper, row in zip(active, theta, strict=False):
                stepper.decide(step, row)
            where = uphill(theta[: len(active)], released, kit)
            gradient = self._noised_gradients(active, pool, where, kit, step)
            if isinstance(kit.training, SamPerturbation):
                released[: len(active)] = gradient
            descent.step(step, gradient)
        results = {i: s.result(a, b) for i, s, a, b in zip(order, steppers, first, theta, strict=True)}
        return [results[i] for i in range(len(jobs))]

    def _steps(self, job: Job) -> int:
        return self.steps_in(job.facts, job.participation)

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
