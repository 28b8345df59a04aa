"""Noise as a paper prints it, with the ε that it truly gives: for faithful modes.

What a client has granted is read as the paper's *claimed* ε. The plan, hence ledger and certificate, holds the
true one, for every step and the true sensitivity. A silo whose grant is smaller refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import Expected, Message
from modicum.core.needs import Need
from modicum.core.parts import Asked, ClientKit, Job, State
from modicum.core.round_state import Collector, RoundState
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.events import Release
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec

Printed = Callable[[ClientFacts], float]
"""Noise-std over clipping bound that the paper prints for a client."""

SLACK = 1e-6  # of ε, so that the guard does not stop at its own rounding


def largest_grant(state: State, public: PublicFacts) -> float:
    """What the paper claims of the client that grants most: budgets are claims here."""
    del state
    return max(client.budget for client in public.clients)


@dataclass(frozen=True)
class AsPublished:
    """The inner mechanism with printed noise instead of calibrated noise."""

    inner: RecordLocal | ClientLevel
    printed: Printed = field(repr=False)

    individuals = True

    @property
    def purpose(self) -> str:
        return self.inner.purpose

    @property
    def offers(self) -> tuple[Need, ...]:
        """What the inner mechanism offers."""
        return self.inner.offers

    @property
    def spec(self) -> PrivacySpec:
        return self.inner.spec

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        z = self.printed(facts)
        if isinstance(self.inner, RecordLocal):
            sampler, count = self.inner.sampler(facts), self.inner.total_steps(facts)
        else:
            sampler, count = self.inner.sampler, facts.participations
        releases = (PlannedRelease(self.purpose, z, sampler, count), *metrics)
        true = epsilon(list(releases), self.spec).epsilon
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=true * (1 + SLACK), releases=releases)

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        return self.inner.events(asked, kit)

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        return self.inner.expected(asked, kit)

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        return self.inner.run(jobs, kit)

    def collect(self, state: RoundState) -> Collector:
        return self.inner.collect(state)
