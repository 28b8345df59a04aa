"""What a noise schedule is: a plan for a client's whole run, and the noise of each participation in it.

A new schedule is a file here with a class that has `plan` and `noise`, given to a mechanism as `noise`. It sees
public and released values alone, like everything that decides about noise (R2).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from modicum.privacy.events import Origin, Sampler
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec

Noise = tuple[float, Origin]
"""A noise multiplier of the client's own message, and where it comes from."""


@dataclass(frozen=True, kw_only=True)
class TrainingReleases:
    """One client's training releases of a whole run: all that is known of them before their noise is."""

    client: str
    budget: float
    spec: PrivacySpec
    purpose: str
    sampler: Sampler
    steps: int  # releases in all
    participations: int

    def plan(self, releases: tuple[PlannedRelease, ...], budget: float | None = None) -> PrivacyPlan:
        """A plan that lists these releases, for the client's budget or another."""
        granted = self.budget if budget is None else budget
        return PrivacyPlan(client=self.client, spec=self.spec, budget=granted, releases=releases)

    def planned(self, multiplier: float, count: int) -> PlannedRelease:
        """So many of the releases, with this noise."""
        return PlannedRelease(self.purpose, multiplier, self.sampler, count)


@dataclass(frozen=True)
class Moment:
    """When noise is asked for, and what a policy chose, if it did."""

    round: int
    participation: int
    multiplier: float | None = None
    kind: int | None = None


class Schedule(ABC):
    """How much noise a client's training releases carry."""

    adapts: bool = False  # a policy may choose each multiplier, and a filter guards the budget (R2)
    fits_lattice: bool = False  # one noise for all releases, so that it can be drawn in integers (R12)
    scales: tuple[float, ...] = ()  # kinds of noise to choose from, as multiples of one (R11)
    in_turn: bool = False  # made for batches in a fixed public order, not for drawn ones (R19)

    @abstractmethod
    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        """What the client agrees to, where its budget is finite.

        Args:
            of: The client's releases of the whole run.
            also: Metrics that it pays for.

        Returns:
            The plan.
        """

    @abstractmethod
    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        """The noise of one participation.

        Args:
            of: The client's releases of the whole run.
            plan: That it agreed to.
            now: Which round and participation.

        Returns:
            The multiplier, and where it comes from.
        """

    def agree(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        """The plan; one that claims nothing where the budget is infinite."""
        if math.isinf(of.budget):
            return PrivacyPlan(client=of.client, spec=of.spec, budget=math.inf, guard=Guard.NONE)
        return self.plan(of, also)

    def of_kind(self, of: TrainingReleases, plan: PrivacyPlan, kind: int) -> float:
        """The multiplier of one kind of noise; of the only one where there are no kinds."""
        del kind
        return plan.multiplier(of.purpose)

    def most_left(self, of: TrainingReleases, steps: int) -> float:
        """How much more noise than fresh one a sum of so many releases can have, however they are weighted."""
        del of, steps
        return 1.0

    def participations(self, of: TrainingReleases) -> tuple[float, ...]:
        """For how many participations there is noise of each kind; () where there are no kinds."""
        del of
        return ()


def chosen(of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
    """What the policy chose, or else the plan's own noise (0 where no privacy is claimed)."""
    if now.multiplier is not None:
        return of.spec.own(now.multiplier), Origin.RELEASED
    return plan.multiplier(of.purpose), Origin.PRESET
