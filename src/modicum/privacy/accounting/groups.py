"""What a record-level guarantee is worth to a person with several records: group privacy from the events (R18).

- Nothing sampled: GDP(μ) for one record is GDP(kμ) for k (Dong, Roth & Su 2022, Theorem 2.14). So is the cap of a
  GDP filter, and integer noise, which is worth a Gaussian.
- Poisson sampling: of k records as many as were drawn move a sum, which is a mixture over Bin(k, q) (`pairs`).
- An RDP filter, and replace-one under Poisson sampling: no bound is computed, and the answer is None.

Never k·ε, whose δ would have to grow by e^{(k−1)ε}.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from modicum.privacy.accounting import gdp, sampler_charge
from modicum.privacy.accounting.choose import plain_mu, shown
from modicum.privacy.accounting.gaussians import normal_form
from modicum.privacy.events import Poisson
from modicum.privacy.fixed_shapes import Capacity
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit

SIZES = (2, 5, 10)


def plan_groups(plan: PrivacyPlan) -> dict[int, float | None]:
    """ε for a person with up to 2, 5 and 10 of a client's records; None where none is known at this δ.

    Empty where the unit is a client, who is protected whatever their records, and where nothing is promised.
    """
    if plan.spec.unit is not Unit.RECORD or plan.guard is Guard.NONE:
        return {}
    return {size: _rounded_up(group_epsilon(plan, size)) for size in SIZES}


def _rounded_up(epsilon: float | None) -> float | None:
    """To four digits: many clients' lines stay short."""
    return None if epsilon is None else float(shown(epsilon))


def group_epsilon(plan: PrivacyPlan, size: int) -> float | None:
    """ε at the plan's δ where up to `size` records of one client are blanked, or replaced, together."""
    match plan.guard:
        case Guard.PLAN:
            return _of_releases(plan.charged, plan.spec, size)
        case Guard.GDP_FILTER:
            mu = gdp.mu_from_epsilon(plan.budget, plan.spec.delta)
            return gdp.epsilon_from_mu(size * mu, plan.spec.delta)
    return None


@lru_cache(maxsize=1 << 14)
def _of_releases(releases: tuple[PlannedRelease, ...], spec: PrivacySpec, size: int) -> float | None:
    integers = any(r.integers is not None for r in releases)
    delta = spec.delta * (1 - sampler_charge.SHARE if integers else 1) - _overflow(releases, size)
    if not delta > 0:
        return None
    groups = normal_form(releases, spec)
    if all(g.rate == 1 for g in groups):
        epsilon = gdp.epsilon_from_mu(size * plain_mu(groups, spec.adjacency), delta)
    elif spec.adjacency is Adjacency.REPLACE_ONE:
        return None
    else:
        from modicum.privacy.accounting import pld

        epsilon = pld.group_epsilon(groups, delta, spec.adjacency, size)
    # Rounding may take each of them further than its bound.
    affordable = sampler_charge.largest_epsilon(releases, spec.delta, size) if integers else epsilon
    return epsilon if epsilon <= affordable else None


def _overflow(releases: tuple[PlannedRelease, ...], size: int) -> float:
    """T·P[Bin(n − 1, q) > K − size]: with fewer others drawn, the whole group fits beside them."""
    return sampler_charge.overflow([_smaller(r, size) for r in releases])


def _smaller(release: PlannedRelease, size: int) -> PlannedRelease:
    """The same release with a capacity that `size` − 1 other records have filled up already."""
    sampler = release.sampler
    if not isinstance(sampler, Poisson) or not isinstance(sampler.shape, Capacity):
        return release
    left = replace(sampler.shape, rows=max(1, sampler.shape.rows - size + 1))
    return replace(release, sampler=replace(sampler, shape=left))
