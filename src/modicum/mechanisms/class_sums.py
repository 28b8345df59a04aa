"""Sufficient statistics in place of gradients: each client's sums of features by class, and how many there are.

A record of length at most 1 stands in one row of the sums and counts 1, so that both together are one query of two
blocks with one joint sensitivity. Later rounds are whole-batch gradient steps, where the budget is divided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from modicum.core.facts import ClientFacts
from modicum.core.layout import Layout
from modicum.core.messages import (
    Expected,
    Message,
    ReleasedSum,
)
from modicum.core.needs import Need
from modicum.core.parts import CLASS_COUNTS, CLASS_SUMS, Asked, ClientKit, Job, State
from modicum.core.round_state import Collector, RoundState
from modicum.errors import UserError
from modicum.mechanisms import block_sums, common, integers
from modicum.mechanisms.record_local import GRADIENT, RecordLocal
from modicum.mechanisms.record_sums import RecordSums
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import Block, NoSampling, Release
from modicum.privacy.noise.fixed import priced
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import Variant

LENGTH = 1.0  # records that are longer are cut to it


@dataclass(frozen=True, kw_only=True)
class ClassSums:
    """(Σ x, number) of each class in the first rounds, then the steps of `after`.

    κ is the weight of a count beside a sum: noise of z√(1+κ²) on sums and z√(1+κ²)/κ on counts has the joint
    multiplier z. The message has the form of a linear head: sums where weights are, counts where biases are.
    """

    rounds: int  # that sums are released in; a budget bought once or many times gives the same precision
    total: int  # rounds of the run
    counts: float = 0.3  # κ
    share: float = 0.2  # of μ², where gradient steps follow
    after: RecordLocal | RecordSums = field(default_factory=lambda: RecordLocal(steps=1))

    purpose = CLASS_SUMS
    offers: ClassVar[tuple[Need, ...]] = ()
    needs = (Need.CLASSES, Need.NUMBERS)

    def __post_init__(self) -> None:
        if not 1 <= self.rounds <= self.total:
            raise UserError(f"class sums are released in 1 to {self.total} rounds, got {self.rounds}")
        if not 0 < self.counts < math.inf or not 0 < self.share < 1:
            raise UserError(
                f"counts need a weight above 0 and sums a share between 0 and 1, got {self.counts}, {self.share}"
            )
        if isinstance(self.after, RecordLocal) and (self.after.batch is not None or self.after.adaptive):
            raise UserError("after class sums come whole-batch steps with the plan's own noise: leave batch out")

    @property
    def spec(self) -> PrivacySpec:
        return self.after.spec

    @property
    def individuals(self) -> bool:
        return self.after.individuals

    @property
    def integers(self) -> bool:
        """Whether noise is drawn on the lattice, as by the steps that follow."""
        return self.after.integers

    @property
    def takes_integers(self) -> bool:
        return self.after.takes_integers

    def on_integers(self, variant: Variant) -> ClassSums:
        return replace(self, after=self.after.on_integers(variant))

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        """With whole participation exactly what is released; of a cohort's members some may release less."""
        if math.isinf(facts.budget):
            return PrivacyPlan(client=facts.name, spec=self.spec, budget=math.inf, guard=Guard.NONE)
        first = min(facts.participations, self.rounds)
        later = min(facts.participations, self.total - self.rounds)
        exact = priced(self.spec, integers=self.integers)
        z = calibrate_noise(exact, facts.budget, NoSampling(), first, also=metrics)
        releases = [PlannedRelease(CLASS_SUMS, z, NoSampling(), first), *metrics]
        if later:
            releases[0] = PlannedRelease(CLASS_SUMS, z / math.sqrt(self.share), NoSampling(), first)
            steps = later * (self.after.steps or 1) if isinstance(self.after, RecordLocal) else later
            z = calibrate_noise(exact, facts.budget, NoSampling(), steps, also=tuple(releases))
            releases.append(PlannedRelease(GRADIENT, z, NoSampling(), steps))
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=facts.budget, releases=tuple(releases))

    def _sums_now(self, asked: Asked) -> bool:
        return asked.broadcast.round < self.rounds

    def _event(self, asked: Asked) -> Release:
        plan = asked.plan
        z = plan.multiplier(CLASS_SUMS) * math.sqrt(1 + self.counts**2) * (1 + 1e-14)
        blocks = (Block(CLASS_SUMS, LENGTH, z), Block(CLASS_COUNTS, 1.0, z / self.counts))
        return common.once(asked, self.spec, blocks, plan.integers(CLASS_SUMS))

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        if not self._sums_now(asked):
            return self.after.events(asked, kit)
        return (self._event(asked), *common.metric_events(self.spec, asked, kit.metrics))

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        if not self._sums_now(asked):
            return self.after.expected(asked, kit)
        return block_sums.expected(self.events(asked, kit), asked.facts)

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        if not self._sums_now(jobs[0]):
            return self.after.run(jobs, kit)
        return [self._release(job, kit) for job in jobs]

    def _release(self, job: Job, kit: ClientKit) -> tuple[Message, State]:
        event = self._event(job)
        records = job.records.real  # a label 0 of a blank would move a count
        sums, counts = class_sums(records.x, records.targets["y"], kit.backend.layout.shapes[0])
        return block_sums.message(job, kit, event, {CLASS_SUMS: sums, CLASS_COUNTS: counts}), job.state

    def collect(self, state: RoundState) -> Collector:
        return self.after.collect(state)

    def open_integers(self, total: Integers, survivors: Sequence[str], state: RoundState) -> ReleasedSum | None:
        """Sums and counts of all clients' records, each divided by how many records there are."""
        assert isinstance(self.after, RecordSums)
        if state.round >= self.rounds:
            return self.after.open_integers(total, survivors, state)
        assert state.features is not None
        classes = state.features.classes
        sizes = {CLASS_SUMS: state.model.numel() - classes, CLASS_COUNTS: classes}
        return integers.open_sum(total, survivors, state, sizes)


def class_sums(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Sums (classes × features) of records cut to length 1, and how many there are of each class (private).

    In double precision, so that a record moves a sum by no more than its own cut length (R10). What is not finite
    counts as a record of zeros.
    """
    x = x.flatten(1).double()
    x = torch.where(torch.isfinite(x).all(1, keepdim=True), x, torch.zeros_like(x))
    largest = x.abs().amax(1, keepdim=True).clamp_min(1e-300)
    scaled = x / largest  # of huge values squares would overflow
    length = largest * torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    x = torch.where(length > LENGTH, x * (LENGTH / length), x)
    sums = x.new_zeros(shape).index_add_(0, y, x)
    return sums, torch.bincount(y, minlength=shape[0]).double()


@dataclass(frozen=True)
class LinearHead:
    """Refuses a model whose parameters are not one linear layer's: sums could not take their place."""

    def wrap(self, model: nn.Module) -> nn.Module:
        shapes = Layout.of(model).shapes
        if len(shapes) != 2 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1]:
            raise UserError("class sums make a linear model: choose model.name = logistic, on public features")
        return model

    def shared(self, name: str) -> bool:
        return True
