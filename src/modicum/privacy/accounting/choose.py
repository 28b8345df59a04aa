"""The one way to a true ε: the right accountant for these releases, or an error naming the rule they break."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from typing import Any

from modicum.errors import UserError
from modicum.privacy.accounting import gdp, sampler_charge
from modicum.privacy.accounting.gaussians import Gaussians, normal_form
from modicum.privacy.events import NoSampling, Release, Sampler
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec

GDP, PLD = "gdp-exact", "pld"
SKELLAM = "skellam-gdp"  # integer noise, by the Gaussian that it is worth


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An ε with everything that gives it a meaning: unit, adjacency, view and δ (in `spec`) and the samplers."""

    epsilon: float
    spec: PrivacySpec
    samplers: tuple[Sampler, ...]
    accountant: str
    releases: int

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise UserError(f"epsilon must be at least 0, got {self.epsilon}")
        if not isinstance(self.spec, PrivacySpec):
            raise UserError("an epsilon means nothing without its PrivacySpec (unit, adjacency, view, delta)")
        if not self.samplers or not all(isinstance(s, Sampler) for s in self.samplers):
            raise UserError("an epsilon means nothing without the samplers of its releases")

    @property
    def delta(self) -> float:
        """δ of the spec."""
        return self.spec.delta

    def sentence(self) -> str:
        """ε, rounded up, δ, and what is protected from whom, in words."""
        return f"({shown(self.epsilon)}, {self.delta:g})-differential privacy. {self.spec.sentence()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "epsilon": self.epsilon,
            **self.spec.to_dict(),
            "samplers": [s.to_dict() for s in self.samplers],
            "accountant": self.accountant,
            "releases": self.releases,
        }


def shown(epsilon: float, digits: int = 4) -> str:
    """ε for people, rounded up: a printed guarantee is never better than the true one."""
    if epsilon == 0 or math.isinf(epsilon):
        return f"{epsilon:g}"
    unit = Decimal(1).scaleb(math.floor(math.log10(epsilon)) + 1 - digits)
    return f"{float(Decimal(epsilon).quantize(unit, ROUND_CEILING)):.{digits}g}"


def epsilon(releases: Iterable[Release | PlannedRelease], spec: PrivacySpec) -> Guarantee:
    """The tightest sound ε of one client's releases, or plans, under `spec`."""
    releases = tuple(releases)
    groups = normal_form(releases, spec)
    value, accountant = _with_draws(releases, groups, spec)
    samplers = tuple(dict.fromkeys(r.sampler for r in releases)) or (NoSampling(),)
    return Guarantee(
        epsilon=value,
        spec=spec,
        samplers=samplers,
        accountant=accountant,
        releases=sum(g.count for g in groups),
    )


def _with_draws(
    releases: tuple[Release | PlannedRelease, ...], groups: Sequence[Gaussians], spec: PrivacySpec
) -> tuple[float, str]:
    """(ε, accountant) where integer noise pays for its sampler out of δ (R12), and a capacity for its overflow."""
    value, accountant = epsilon_of(groups, sampler_charge.exact_delta(releases, spec.delta), spec.adjacency)
    if all(r.integers is None for r in releases):
        return value, accountant
    sampler_charge.refuse_uncertain(releases, value, spec.delta)
    return value, SKELLAM if all(r.integers is not None for r in releases) else f"{accountant}+{SKELLAM}"


def epsilon_of(groups: Sequence[Gaussians], delta: float, adjacency: Adjacency) -> tuple[float, str]:
    """(ε, accountant) of releases in normal form: exact where nothing is sampled, else the PLD bound."""
    return _epsilon_of(tuple(sorted(groups)), delta, Adjacency(adjacency))


@lru_cache(maxsize=1 << 14)
def _epsilon_of(groups: tuple[Gaussians, ...], delta: float, adjacency: Adjacency) -> tuple[float, str]:
    if all(g.rate == 1 for g in groups):
        return gdp.epsilon_from_mu(plain_mu(groups, adjacency), delta), GDP
    from modicum.privacy.accounting import pld

    return pld.epsilon(groups, delta, adjacency), PLD


def plain_mu(groups: Iterable[Gaussians], adjacency: Adjacency) -> float:
    """μ of unsampled Gaussians; replace-one doubles the sensitivity (R6)."""
    return adjacency.moves * math.sqrt(math.fsum(g.count / g.noise_multiplier**2 for g in groups))
