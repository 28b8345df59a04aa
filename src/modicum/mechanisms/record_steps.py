"""One client's way through the local steps of record-level privacy: decide, reserve, sample, release, note.

Private values live in a `Stepper` and leave by the gate alone. The mechanism says what a step costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from modicum.core.extension_points import SamPerturbation
from modicum.core.facts import ClientFacts
from modicum.core.messages import Message, Noised, NoiseFacts
from modicum.core.parts import Asked, ClientKit, Job, Observation, Place, Scope, Signal, State
from modicum.core.release_gate import ReleaseRequest, release_together
from modicum.mechanisms import common
from modicum.privacy.events import Release
from modicum.privacy.fixed_shapes import FixedShape
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.spec import PrivacySpec


class Steps(Protocol):
    """A mechanism that releases each local step: what it says about one."""

    @property
    def purpose(self) -> str:
        """The name of the main block."""

    @property
    def spec(self) -> PrivacySpec:
        """What is protected, from whom."""

    def expected_batch(self, facts: ClientFacts) -> float:
        """What sums are divided by."""

    def steps_in(self, facts: ClientFacts, participation: int) -> int:
        """Local steps of one participation."""

    def release(self, asked: Asked, signals: Sequence[Signal], step: int, count: int) -> Release:
        """What so many steps from this one on release."""

    def unit_of(self, bound: float) -> float:
        """What a released gradient is divided by."""

    def facts_of(
        self,
        event: Release,
        facts: ClientFacts,
        steps: int,
        gains: tuple[float, float] = ...,
        plan: PrivacyPlan | None = None,
    ) -> NoiseFacts:
        """What is known of the noise after so many steps."""


class Stepper:
    """One client in one round, step by step."""

    def __init__(self, mechanism: Steps, job: Job, kit: ClientKit) -> None:
        self.mechanism, self.job, self.kit = mechanism, job, kit
        self.records = job.records.with_targets(kit.training.targets(job.records, job.state, kit.backend))
        self.expected = mechanism.expected_batch(job.facts)
        self.decision = job.broadcast.decision
        self.steps = mechanism.steps_in(job.facts, job.participation)
        self.event = self._event(0, self.steps)
        self.policy_state: State = dict(job.state.get("policy") or self._first_policy_state())
        self.released = 0  # steps that have passed the gate
        self.stopped: Tensor | None = None  # the local model at the step that the ledger refused
        self.signals: dict[str, float] = {s.name: 0.0 for s in kit.policy.signals}

    def _first_policy_state(self) -> State:
        policy, public = self.kit.policy, self.kit.public
        return policy.init(public) if self._own_policy and public is not None else {}

    @property
    def _own_policy(self) -> bool:
        """Whether the client decides anew before each step, from its own releases."""
        return self.kit.policy.scope is Scope.STEP and self.kit.policy.place is Place.CLIENT

    def _event(self, step: int, count: int) -> Release:
        job = self.job
        asked = job if self.decision is job.broadcast.decision else job.by(self.decision)
        return self.mechanism.release(asked, self.kit.policy.signals, step, count)

    def decide(self, step: int, model: Tensor) -> None:
        """Settle this step's bound and noise, and have it reserved before any record is looked at.

        A refusal depends on public and released values alone; the client keeps the model it has until then (R2).
        """
        if self.stopped is not None:
            return
        if self._own_policy:
            name = self.job.facts.name
            self.decision = self.kit.policy.decide(self.policy_state, self.job.broadcast.round, [name])[name]
            self.event = self._event(step, 1)
        if not self.job.gate.reserve(self.event):
            self.stopped = model.clone()

    @property
    def unit(self) -> float:
        """What a released gradient is divided by (`unit_of`)."""
        return self.mechanism.unit_of(self.decision.bound)

    def chosen(self, step: int) -> Tensor:
        """Which records enter this step."""
        if self.stopped is not None:
            return torch.arange(0)
        return self.job.gate.sample(self.event, step, len(self.records), self.records.present)

    @property
    def shape(self) -> FixedShape | None:
        """Of the passes over drawn records; None: their number is whatever was drawn."""
        return self.event.sampler.shape

    def real(self, norms: Tensor, chosen: Tensor) -> Tensor:
        """The norms of chosen rows that are no blanks: a blank's norm would move a signal."""
        return norms if self.records.present is None else norms[self.records.present[chosen]]

    def request(self, step: int, total: Tensor, norms: Tensor) -> ReleaseRequest:
        """The clipped sum and the signals of this step, for the gate to add noise to."""
        signals = common.contributions(norms, self.decision.bound, self.kit.policy.signals)
        return ReleaseRequest(self.job.gate, self.event, step, {self.mechanism.purpose: total, **signals})

    def note(self, step: int, gradient: Tensor, noised: Mapping[str, Tensor]) -> None:
        """Keep what was released of this step."""
        self.released += 1
        seen = {name: noised[name].item() / self.expected + 0.5 for name in self.signals}
        for name, value in seen.items():
            self.signals[name] += value
        self._observe(step, gradient, seen)

    def _observe(self, step: int, gradient: Tensor, seen: dict[str, float]) -> None:
        if self._own_policy:
            policy, job = self.kit.policy, self.job
            noised = Noised(job.facts.name, job.broadcast.round, gradient, seen)
            released = noised.known(self.mechanism.facts_of(self.event, job.facts, 1, plan=job.plan))
            observed = Observation(job.broadcast.round, (released,), {job.facts.name: self.decision}, step=step)
            self.policy_state = policy.observe(self.policy_state, observed)

    def result(self, first: Tensor, trained: Tensor) -> tuple[Message, State]:
        """What the client sends after its last step, and what it keeps."""
        trained = trained if self.stopped is None else self.stopped
        steps = max(1, self.released)
        metrics = common.released_metrics(self.job, self.kit, self.mechanism.spec)
        job = self.job
        update = common.shared_part(trained - first, job, self.kit)
        signals = {name: total / steps for name, total in self.signals.items()}
        message = Noised(job.facts.name, job.broadcast.round, update, signals, metrics)
        state = common.keep_personal(job, self.kit, trained)
        if self.policy_state:
            state["policy"] = self.policy_state
        return message, state


def uphill(theta: Tensor, released: Tensor, kit: ClientKit) -> Tensor:
    """θ + ρ·g̃/‖g̃‖ with the gradient g̃ that the step before released; θ itself in a round's first step."""
    if not isinstance(kit.training, SamPerturbation):
        return theta
    before = released[: len(theta)]
    direction: Tensor = before / before.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return theta + kit.training.ascent * direction


def release(steppers: Sequence[Stepper], step: int, sums: Tensor, norms: Sequence[Tensor]) -> Tensor:
    """The noised mean gradients over the *expected* batch sizes (R4)."""
    if steppers[0].signals:
        norms = common.on_cpu(norms)
    requests = [stepper.request(step, *own) for stepper, *own in zip(steppers, sums.unbind(), norms, strict=True)]
    noised, others = release_together(requests, steppers[0].mechanism.purpose, sums)
    gradients = noised.div_(noised.new_tensor([stepper.expected * stepper.unit for stepper in steppers])[:, None])
    for stepper, gradient, other in zip(steppers, gradients.unbind(), others, strict=True):
        stepper.note(step, gradient, other)
    return gradients
