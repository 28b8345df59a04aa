"""The same plans priced by dp-accounting, which shares no code with our accountants.

Two traps are kept away here (R6): its RDP accountant does not double an unsampled Gaussian's sensitivity under
replace-one, so plans go to its PLD accountant, which does; and its RDP accountant has no replace-one bound for
sampled Gaussians, so a filter is priced as add-remove at z/2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from modicum.errors import MissingExtraError
from modicum.privacy import skellam_second_opinion as skellam
from modicum.privacy.budgets import NO_NOISE
from modicum.privacy.events import Poisson, Sampler
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, TrustedServer
from modicum.privacy.views import KnownTo


def library() -> Any:
    """dp_accounting, or an error that names the extra."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise MissingExtraError("dp-accounting", None, "the independent second opinion") from None
    return dp_accounting


def plan_epsilon(plan: PrivacyPlan) -> float:
    """ε of everything planned, by PLD."""
    library()  # asked each time: what is remembered must not hide that it is not there
    return _price(plan.spec, plan.releases)


@lru_cache(maxsize=256)
def _price(spec: PrivacySpec, releases: tuple[PlannedRelease, ...]) -> float:
    """Remembered: a second of work, and verifying a folder again, or another run by the same terms, asks for the
    same."""
    dp = library()
    neighbours = (
        dp.NeighboringRelation.REPLACE_ONE
        if spec.adjacency is Adjacency.REPLACE_ONE
        else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    accountant = dp.pld.PLDAccountant(neighbours)
    for planned in releases:
        accountant.compose(_event(dp, _worth(planned, spec), planned.sampler, spec), planned.count)
    first = float(accountant.get_epsilon(spec.delta))
    taken = skellam.delta_taken([(r.integers, r.count) for r in releases if r.integers is not None], first)
    if not taken:
        return first
    return float(accountant.get_epsilon(spec.delta - taken)) if taken < spec.delta else math.inf


def _worth(planned: PlannedRelease, spec: PrivacySpec) -> float:
    """The multiplier in what the adversary sees; of integer noise, from its own numbers alone."""
    noise = planned.integers
    if noise is None:
        return _seen(planned.noise_multiplier, spec)
    return skellam.worth(noise.share * _seen(1.0, spec) ** 2, noise.square)


def filter_epsilon(plan: PrivacyPlan, spent: Mapping[tuple[float, Sampler], int]) -> float:
    """ε of what a filter let through, counted by (noise multiplier, sampler): at most its cap, if it works."""
    dp = library()
    shift = 2.0 if plan.spec.adjacency is Adjacency.REPLACE_ONE else 1.0
    charges = [(_seen(z, plan.spec) / shift, sampler, count) for (z, sampler), count in spent.items()]
    if not charges:
        return 0.0
    if any(z < NO_NOISE for z, _, _ in charges):
        return math.inf
    if plan.order is None:
        accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp.GaussianDpEvent(1 / math.sqrt(math.fsum(n / z**2 for z, _, n in charges))))
    else:
        accountant = dp.rdp.RdpAccountant([plan.order], dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
        for z, sampler, count in charges:
            accountant.compose(_event(dp, z, sampler, plan.spec), count)
    return float(accountant.get_epsilon(plan.spec.delta))


def _seen(z: float, spec: PrivacySpec) -> float:
    """The multiplier in what the adversary sees (R8)."""
    view = spec.view
    if not isinstance(view, SecureAggregation):
        return z
    return z * math.sqrt(view.participants - view.colluding - view.dropouts)


def _event(dp: Any, z: float, sampler: Sampler, spec: PrivacySpec) -> Any:
    plain = dp.GaussianDpEvent(z)
    if not isinstance(sampler, Poisson):
        return plain
    hidden = sampler.known_to is KnownTo.CLIENT or (
        sampler.known_to is KnownTo.SERVER and isinstance(spec.view, TrustedServer)
    )
    return dp.PoissonSampledDpEvent(sampler.rate, plain) if hidden else plain
