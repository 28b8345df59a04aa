"""What a filter may spend and what it charges for a release (R2); what a whole plan costs.

Accountants are loaded when they are asked: whoever only reads a ledger does without them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from modicum.privacy.events import Release, Sampler, Shuffled
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec

if TYPE_CHECKING:
    from modicum.privacy.accounting import Guarantee

NO_NOISE = 1e-100  # below this a square is zero in floating point


def filter_cap(plan: PrivacyPlan) -> float:
    """What a filter may still spend: μ² for the GDP filter, cap(α*) for the RDP filter, less what was before."""
    cap = _filter_cap(plan.guard, plan.budget, plan.spec.delta, plan.order)
    return cap - math.fsum(price(plan, r.noise_multiplier, r.sampler, r.count) for r in plan.before)


def filter_cost(plan: PrivacyPlan, release: Release) -> float | None:
    """What a filter charges for a release; None where no rule prices it.

    The GDP filter charges hidden sampling as no sampling at all.
    """
    if release.spec.adjacency is Adjacency.ADD_REMOVE and isinstance(release.sampler, Shuffled):
        return None
    return price(plan, release.noise_multiplier, release.sampler, release.count)


def price(plan: PrivacyPlan, noise_multiplier: float, sampler: Sampler, count: int = 1) -> float:
    """Of so many releases, in the units of the plan's filter."""
    z = plan.spec.charged(noise_multiplier)
    if z < NO_NOISE:
        return math.inf
    if plan.order is None:
        return count / z**2
    from modicum.privacy.accounting import hidden_rate, rdp

    return count * rdp.rdp_sampled_gaussian(hidden_rate(sampler, plan.spec), z, plan.order)


def plan_guarantee(plan: PrivacyPlan) -> Guarantee:
    """ε of everything the plan lists, whether it is released in the end or not."""
    return _plan_guarantee(plan.charged, plan.spec)


@lru_cache(maxsize=4096)
def _plan_guarantee(releases: tuple[PlannedRelease, ...], spec: PrivacySpec) -> Guarantee:
    """Many clients plan the same."""
    from modicum.privacy import accounting

    return accounting.epsilon(releases, spec)


@lru_cache(maxsize=4096)
def _filter_cap(guard: Guard, epsilon: float, delta: float, order: float | None) -> float:
    if guard is Guard.GDP_FILTER:
        from modicum.privacy.accounting import gdp

        return float(gdp.mu_from_epsilon(epsilon, delta)) ** 2
    from modicum.privacy.accounting import rdp

    assert order is not None  # the plan says so
    return float(rdp.filter_cap(epsilon, delta, order))
