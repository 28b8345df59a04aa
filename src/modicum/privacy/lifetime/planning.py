"""Several runs planned on one lifetime grant, before anything is spent (R15)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from modicum.errors import UserError
from modicum.privacy.accounting import gdp
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.lifetime.grant import Filter, Lifetime, order_for, samples
from modicum.privacy.plan import Guard, PrivacyPlan


@dataclass(frozen=True)
class Step:
    """One run after those before it."""

    name: str
    epsilon: float  # of this run alone, by its own certificate
    share: float  # of the grant that it takes
    left: float  # the share that is left then, nothing where it does not fit
    fits: bool
    next: float  # ε of the largest further run that would fit then, each of its releases charged in full; 0: none


def lifetime_for(epsilon: float, delta: float, plans: Sequence[PrivacyPlan]) -> Lifetime:
    """A grant as an account would be opened with it, by the first of these runs."""
    if not plans:
        raise UserError("name at least one run to plan, e.g. modicum account plan experiment.toml --grant 4")
    first = plans[0]
    unit, adjacency = first.spec.unit, first.spec.adjacency
    if not samples(first):
        return Lifetime(unit=unit, adjacency=adjacency, filter=Filter.GDP, budget=epsilon, delta=delta)
    order = order_for(unit, adjacency, epsilon, delta, first)
    return Lifetime(unit=unit, adjacency=adjacency, filter=Filter.RDP, budget=epsilon, delta=delta, order=order)


def steps(lifetime: Lifetime, spent: float, plans: Sequence[tuple[str, PrivacyPlan]]) -> tuple[Step, ...]:
    """Each run in turn. One that does not fit draws nothing, as an account would refuse it.

    Args:
        lifetime: The grant, with a budget.
        spent: What was drawn before, in the filter's currency.
        plans: Names and plans, in the order in which they would be played.
    """
    found, cap = [], lifetime.cap
    for name, plan in plans:
        cost = lifetime.price(plan)
        fits = spent + cost <= cap
        spent = spent + cost if fits else spent
        share = 0.0 if math.isinf(cap) else cost / cap
        left = 1.0 if math.isinf(cap) else max(0.0, 1 - spent / cap)
        found.append(Step(name, _alone(plan), share, left, fits, largest(lifetime, spent)))
    return tuple(found)


def largest(lifetime: Lifetime, spent: float) -> float:
    """ε, at the grant's δ, of the largest run of plain Gaussians that would still fit; 0 where none would."""
    left = lifetime.cap - spent
    if lifetime.delta is None or left <= 0:
        return 0.0
    if math.isinf(left):
        return math.inf
    mu = math.sqrt(left if lifetime.order is None else 2 * left / lifetime.order)  # one unit's whole effect
    return gdp.epsilon_from_mu(mu, lifetime.delta)


def _alone(plan: PrivacyPlan) -> float:
    if plan.guard is Guard.NONE:
        return math.inf
    return plan_guarantee(plan).epsilon if plan.guard is Guard.PLAN else plan.budget
