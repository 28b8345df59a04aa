"""The same plans priced by dp-accounting, which shares no code with our accountants.

Two traps are kept away here (R6): its RDP accountant does not double an unsampled Gaussian's sensitivity under
replace-one, so plans go to its PLD accountant, which does; and its RDP accountant has no replace-one bound for
sampled Gaussians, so a filter is priced as add-remove at z/2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.signal
from scipy.special import betainc

from modicum.errors import MissingExtraError
from modicum.privacy import skellam_second_opinion as skellam
from modicum.privacy.accounting.filters import NO_NOISE
from modicum.privacy.correlated import Correlation
from modicum.privacy.events import Cyclic, Poisson, Sampler
from modicum.privacy.fixed_shapes import Capacity
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, TrustedServer
from modicum.privacy.views import KnownTo

MOST_SAMPLED, MOST_KINDS = 10**6, 500  # of a plan; beyond, the library needs minutes and gigabytes
GRID, FINEST = 1e-4, 1e-5  # the library's own grid of losses; of an ε that is large, this share of it
ACCURACY = 2e-3  # of ε, of which many steps on a grid take at most so much


def library() -> Any:
    """dp_accounting, or an error that names the extra."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise MissingExtraError("dp-accounting", None, "the independent second opinion") from None
    return dp_accounting


def too_much(plan: PrivacyPlan) -> list[str]:
    """Why the library is not asked about a plan: few bytes of a forger could keep it busy for hours."""
    sampled = _kinds(plan.spec, plan.charged)
    if plan.guard is not Guard.PLAN or (sampled.total() <= MOST_SAMPLED and len(sampled) <= MOST_KINDS):
        return []
    return [
        f"it plans {sampled.total():,} sampled releases of {len(sampled):,} kinds, and a second opinion is "
        f"computed for at most {MOST_SAMPLED:,} of {MOST_KINDS:,}"
    ]


def plan_epsilon(plan: PrivacyPlan, about: float = 1.0) -> float:
    """ε of everything planned, by PLD. `about` what it is decides on the grid, and on nothing else."""
    library()  # asked each time: what is remembered must not hide that it is not there
    steps = _kinds(plan.spec, plan.charged).total()
    return _price(plan.spec, plan.charged, _grid(about, max(1, steps), plan.spec.delta))


@lru_cache(maxsize=256)
def _price(spec: PrivacySpec, releases: tuple[PlannedRelease, ...], grid: float) -> float:
    """Remembered: a second of work, and verifying a folder again, or another run by the same terms, asks for the
    same."""
    dp = library()
    neighbours = (
        dp.NeighboringRelation.REPLACE_ONE
        if spec.adjacency is Adjacency.REPLACE_ONE
        else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    accountant = dp.pld.PLDAccountant(neighbours, value_discretization_interval=grid)
    for (z, sampler), count in _kinds(spec, releases).items():
        accountant.compose(_event(dp, z, sampler, spec), count)
    plain = math.fsum(_times(r) / _worth(r, spec) ** 2 for r in releases if not _hidden(r.sampler, spec))
    if plain:
        accountant.compose(dp.GaussianDpEvent(1 / math.sqrt(plain)))
    first = float(accountant.get_epsilon(spec.delta))
    taken = skellam.delta_taken([(r.integers, r.count) for r in releases if r.integers is not None], first)
    taken += math.fsum(_left_out(r.sampler) * r.count for r in releases)
    if not taken:
        return first
    return float(accountant.get_epsilon(spec.delta - taken)) if taken < spec.delta else math.inf


def _kinds(spec: PrivacySpec, releases: Iterable[PlannedRelease]) -> Counter[tuple[float, Sampler]]:
    """Planned releases whose sampling hides something, by noise and sampler."""
    found: Counter[tuple[float, Sampler]] = Counter()
    for planned in releases:
        if _hidden(planned.sampler, spec):
            found[_worth(planned, spec), planned.sampler] += planned.count
    return found


def _grid(about: float, steps: int, delta: float) -> float:
    """Width h of the grid. Rounding K losses up to it raises ε by about K·h²/12·(1 + d), with d = −d ln δ/dε,
    which is about 2·ln(1/δ)/ε: a share `ACCURACY` of ε at most. The library's arrays have some ε/h points."""
    if not 0 < about < math.inf:
        return GRID
    rounding = math.sqrt(12 * ACCURACY * about / (steps * (1 + 2 * math.log(1 / delta) / about)))
    return min(max(GRID, FINEST * about), rounding)


def _worth(planned: PlannedRelease, spec: PrivacySpec) -> float:
    """The multiplier in what the adversary sees; of integer noise, from its own numbers alone."""
    noise, correlated = planned.integers, planned.correlated
    if correlated is not None:
        return planned.row_multiplier * math.sqrt(_times(planned)) / _moved(correlated, _times(planned))
    if noise is None:
        return _seen(planned.noise_multiplier, spec)
    return skellam.worth(noise.share * _seen(1.0, spec) ** 2, noise.square)


def _times(planned: PlannedRelease) -> int:
    """How often one unit takes part: where batches come in turn, as often as its batch does."""
    if isinstance(planned.sampler, Cyclic):
        return len(range(0, planned.count, planned.sampler.batches))
    return planned.count


def _moved(correlated: Correlation, participations: int) -> float:
    """‖C·π‖ of participations π as close as the promise allows, by a convolution."""
    taking = np.zeros(correlated.steps)
    taking[:: correlated.separation][:participations] = 1.0
    column = correlated.factor.column(correlated.steps)
    return float(np.linalg.norm(scipy.signal.fftconvolve(taking, column)[: correlated.steps]))


def stopping_epsilon(plan: PrivacyPlan, shape: float, mean: float) -> float:
    """ε of the best of a random number of trials with this plan, by RDP: the library's RepeatAndSelect (R17)."""
    dp = library()
    from dp_accounting.dp_event import ComposedDpEvent, RepeatAndSelectDpEvent, SelfComposedDpEvent

    shift = 2.0 if plan.spec.adjacency is Adjacency.REPLACE_ONE else 1.0
    trial = [
        SelfComposedDpEvent(
            _event(dp, _seen(r.noise_multiplier, plan.spec) / shift, r.sampler, plan.spec), r.count
        )
        for r in plan.charged
    ]
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(RepeatAndSelectDpEvent(ComposedDpEvent(trial), mean, shape))
    return float(accountant.get_epsilon(plan.spec.delta))


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
        accountant = dp.pld.PLDAccountant(
            dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
            value_discretization_interval=_grid(plan.budget, 1, plan.spec.delta),
        )
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


def _hidden(sampler: Sampler, spec: PrivacySpec) -> bool:
    """Whether the adversary cannot see whom the sampler chose."""
    return isinstance(sampler, Poisson) and (
        sampler.known_to is KnownTo.CLIENT
        or (sampler.known_to is KnownTo.SERVER and isinstance(spec.view, TrustedServer))
    )


def _left_out(sampler: Sampler) -> float:
    """P[Bin(n − 1, q) ≥ K] of a capacity, as an incomplete beta function."""
    shape = sampler.shape if isinstance(sampler, Poisson) else None
    if not isinstance(sampler, Poisson) or not isinstance(shape, Capacity) or shape.rows > shape.records - 1:
        return 0.0
    return float(betainc(shape.rows, shape.records - shape.rows, sampler.rate))


def _event(dp: Any, z: float, sampler: Sampler, spec: PrivacySpec) -> Any:
    plain = dp.GaussianDpEvent(z)
    if isinstance(sampler, Poisson) and _hidden(sampler, spec):
        return dp.PoissonSampledDpEvent(sampler.rate, plain)
    return plain
