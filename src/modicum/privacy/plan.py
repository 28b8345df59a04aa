"""What a client agrees to before a run: everything it may release, and how the budget is guarded."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from modicum.errors import UserError
from modicum.privacy.correlated import Correlation, correlated_to_dict, correlation_from_dict
from modicum.privacy.events import (
    Sampler,
    integers_from_dict,
    integers_to_dict,
    sampler_from_dict,
)
from modicum.privacy.integer_noise import IntegerNoise
from modicum.privacy.spec import PrivacySpec


class Guard(StrEnum):
    """What keeps a client inside its budget."""

    PLAN = "plan"  # noise, rate and counts are fixed beforehand: plain composition (R1)
    GDP_FILTER = "gdp-filter"  # noise may adapt, no hidden sampling (R2)
    RDP_FILTER = "rdp-filter"  # noise may adapt under hidden sampling: one order fixed beforehand (R2)
    NONE = "none"  # no privacy is claimed: ε = ∞


@dataclass(frozen=True)
class PlannedRelease:
    """At most `count` releases of one kind, all with this noise multiplier and sampler."""

    purpose: str
    noise_multiplier: float  # of the client's own message, all blocks of the query together
    sampler: Sampler
    count: int
    integers: IntegerNoise | None = None  # None: noise of floating-point numbers
    correlated: Correlation | None = None  # None: noise of each release is its own (R19)

    def __post_init__(self) -> None:
        if self.count < 1 or not self.noise_multiplier > 0:
            raise UserError(
                f"planned release {self.purpose!r} needs a positive count and noise multiplier, got "
                f"{self.count} and {self.noise_multiplier}"
            )

    @property
    def participations(self) -> int:
        """In how many of these releases one unit may be."""
        return self.sampler.participations(self.count)

    @property
    def row_multiplier(self) -> float:
        """Noise over bound of one row of noise: more than a release is worth where rows are correlated."""
        return self.noise_multiplier * (1.0 if self.correlated is None else self.correlated.scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {
            "purpose": self.purpose,
            "noise_multiplier": self.noise_multiplier,
            "sampler": self.sampler.to_dict(),
            "count": self.count,
            **integers_to_dict(self.integers),
            **correlated_to_dict(self.correlated),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> PlannedRelease:
        """Back from `to_dict`."""
        return cls(
            str(d["purpose"]),
            float(d["noise_multiplier"]),
            sampler_from_dict(d["sampler"]),
            int(d["count"]),
            integers_from_dict(d),
            correlation_from_dict(d),
        )


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """One client's agreement. It is the first thing written to the ledger, and what a certificate reports."""

    client: str
    spec: PrivacySpec
    budget: float  # ε the client grants; inf where no privacy is claimed
    guard: Guard = Guard.PLAN
    releases: tuple[PlannedRelease, ...] = ()  # for Guard.PLAN
    order: float | None = None  # α* of the RDP filter
    before: tuple[PlannedRelease, ...] = ()  # made by earlier looks within the same budget; never made again

    def __post_init__(self) -> None:
        object.__setattr__(self, "guard", Guard(self.guard))
        if not self.budget > 0:
            raise UserError(f"client {self.client!r}: the budget ε must be positive, got {self.budget}")
        if (self.guard is Guard.NONE) != math.isinf(self.budget):
            raise UserError(f"client {self.client!r}: an infinite budget and guard 'none' go together")
        if (self.guard is Guard.RDP_FILTER) != (self.order is not None):
            raise UserError(f"client {self.client!r}: the RDP filter, and nothing else, needs an order α*")

    @property
    def charged(self) -> tuple[PlannedRelease, ...]:
        """All that the budget pays for: what this run may release, and what was released before."""
        return (*self.releases, *self.before)

    def multiplier(self, purpose: str) -> float:
        """The frozen noise multiplier of the releases of this purpose; 0 where no privacy is claimed.

        Of correlated noise it is that of a row: what is added, and shared by the clients of a sum.
        """
        return next((r.row_multiplier for r in self.releases if r.purpose == purpose), 0.0)

    def correlation(self, purpose: str) -> Correlation | None:
        """How the noise of the releases of this purpose is correlated; None where each draws its own."""
        return next((r.correlated for r in self.releases if r.purpose == purpose), None)

    def integers(self, purpose: str) -> IntegerNoise | None:
        """The integer noise of the releases of this purpose; None where it is of floats."""
        return next((r.integers for r in self.releases if r.purpose == purpose), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal; null stands for a budget of ∞."""
        return {
            "client": self.client,
            "spec": self.spec.to_dict(),
            "budget": None if math.isinf(self.budget) else self.budget,
            "guard": str(self.guard),
            "releases": [r.to_dict() for r in self.releases],
            "order": self.order,
            **({"before": [r.to_dict() for r in self.before]} if self.before else {}),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> PrivacyPlan:
        """Back from `to_dict`."""
        return cls(
            client=str(d["client"]),
            spec=PrivacySpec.from_dict(d["spec"]),
            budget=math.inf if d["budget"] is None else float(d["budget"]),
            guard=Guard(d["guard"]),
            releases=tuple(PlannedRelease.from_dict(r) for r in d["releases"]),
            order=None if d["order"] is None else float(d["order"]),
            before=tuple(PlannedRelease.from_dict(r) for r in d.get("before", ())),
        )


def share_reserved(plans: Iterable[PrivacyPlan], made: Mapping[str, int]) -> float:
    """Releases made of those planned, in the mean over clients who planned something."""
    planned = {plan.client: sum(r.count for r in plan.releases) for plan in plans}
    shares = [made.get(name, 0) / count for name, count in planned.items() if count]
    return statistics.fmean(shares) if shares else 0.0
