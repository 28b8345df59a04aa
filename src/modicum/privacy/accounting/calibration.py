"""From a budget to noise, steps or a sampling rate: the answer is rounded to the safe side and verified again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from modicum.errors import UserError
from modicum.privacy.accounting import gdp
from modicum.privacy.accounting.choose import epsilon_of, plain_mu
from modicum.privacy.accounting.gaussians import Gaussians, hidden_rate, normal_form
from modicum.privacy.checks import positive, steps
from modicum.privacy.events import Poisson, Sampler
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec

DIGITS = 5  # significant digits of a calibrated noise multiplier
MAX_STEPS = 10**7
_SMALLEST, _LARGEST = 0.05, 1e8  # noise multipliers the search considers
_CLOSE = 3e-4  # how far under its target a calibrated ε may stay, relative

Kinds = tuple[tuple[float, int], ...]
"""(multiple of z, number of releases) of each kind of noise that a plan holds."""


def calibrate_noise(
    spec: PrivacySpec,
    epsilon: float,
    sampler: Sampler,
    count: int,
    also: Iterable[PlannedRelease] = (),
) -> float:
    """The smallest noise multiplier of the client's own message with which everything costs at most ε.

    Behind secure aggregation it is the client's share of the noise. `also` is fixed already and shares the budget.
    """
    return calibrate_kinds(spec, epsilon, sampler, ((1.0, count),), also)


def calibrate_kinds(
    spec: PrivacySpec,
    epsilon: float,
    sampler: Sampler,
    kinds: Kinds,
    also: Iterable[PlannedRelease] = (),
) -> float:
    """The smallest z with which n_j releases at s_j·z, for all (s_j, n_j) of `kinds`, cost at most ε (R11)."""
    target = positive("the budget ε", epsilon)
    kinds = tuple((positive("a multiple of the noise", s), steps(n)) for s, n in kinds)
    spec = _beside_overflow(spec, sampler, sum(n for _, n in kinds))
    rest = normal_form(tuple(also), spec)
    rate = hidden_rate(sampler, spec)
    seen = _effective_noise(target, spec.delta, spec.adjacency, rate, kinds, rest)
    # A share behind secure aggregation is rounded as well, then checked in what the adversary sees.
    own = round_up(spec.own(seen))
    while _cost(spec.seen(own), rate, kinds, rest, spec) > target:
        own = round_up(own * (1 + 10.0 ** (1 - DIGITS)))
    return own


def largest_steps(
    spec: PrivacySpec,
    epsilon: float,
    sampler: Sampler,
    noise_multiplier: float,
    also: Iterable[PlannedRelease] = (),
) -> int:
    """How many releases with this noise fit into ε beside those in `also` (at most `MAX_STEPS`)."""
    target = positive("the budget ε", epsilon)
    z = spec.seen(positive("the noise multiplier", noise_multiplier))
    rest, rate = normal_form(tuple(also), spec), hidden_rate(sampler, spec)

    def fits(count: int) -> bool:
        return _cost(z, rate, ((1.0, count),), rest, _beside_overflow(spec, sampler, count)) <= target

    if not fits(1):
        raise UserError(
            f"budget ε={target:g} cannot be met with noise multiplier {noise_multiplier:g}: one step alone "
            f"reaches {_cost(z, rate, ((1.0, 1),), rest, spec):.4g} (raise the noise or the budget)"
        )
    return _largest(fits, MAX_STEPS)


def largest_rate(
    spec: PrivacySpec,
    epsilon: float,
    sampler: Poisson,
    count: int,
    noise_multiplier: float,
    also: Iterable[PlannedRelease] = (),
) -> float:
    """The largest Poisson rate, rounded down, with which `count` releases fit into ε; `sampler` says who draws."""
    target = positive("the budget ε", epsilon)
    z = spec.seen(positive("the noise multiplier", noise_multiplier))
    rest = normal_form(tuple(also), spec)
    if hidden_rate(replace(sampler, rate=0.5), spec) != 0.5:
        raise UserError("this sampler's coins are seen by the adversary, so its rate does not change ε (R5)")

    def cost(ticks: int) -> float:
        return _cost(z, ticks / _TICKS, ((1.0, steps(count)),), rest, spec)

    if cost(1) > target:
        raise UserError(
            f"budget ε={target:g} cannot be met with noise multiplier {noise_multiplier:g} and {count} steps at "
            f"any rate: a rate of {1 / _TICKS:g} reaches {cost(1):.4g} (raise the noise or lower the steps)"
        )
    return _largest(lambda ticks: cost(ticks) <= target, _TICKS) / _TICKS


def _beside_overflow(spec: PrivacySpec, sampler: Sampler, count: int) -> PrivacySpec:
    """The spec with what so many releases leave of δ where a capacity may overflow (R16)."""
    taken = sampler.overflow * count
    if not taken:
        return spec
    if taken >= spec.delta:
        raise UserError(f"a capacity overflows too often for δ={spec.delta:g}: use lanes, or fewer steps")
    return replace(spec, delta=spec.delta - taken)


_TICKS = 100_000  # rates are searched in multiples of 1e-5


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n ≤ limit that fits, given that 1 does and that fitting is monotone."""
    low, high = 1, 2
    while high < limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit)
    if high == limit and fits(limit):
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _cost(z: float, rate: float, kinds: Kinds, rest: tuple[Gaussians, ...], spec: PrivacySpec) -> float:
    return epsilon_of((*rest, *_groups(z, rate, kinds)), spec.delta, spec.adjacency)[0]


def _groups(z: float, rate: float, kinds: Kinds) -> tuple[Gaussians, ...]:
    return tuple(Gaussians(s * z, rate, n) for s, n in kinds)


def _weight(kinds: Kinds) -> float:
    """Σ n_j/s_j²: how many releases at z itself cost as much, where nothing is sampled."""
    return math.fsum(n / s**2 for s, n in kinds)


def round_up(z: float) -> float:
    """To `DIGITS` significant digits."""
    places = DIGITS - 1 - math.floor(math.log10(z))
    return math.ceil(z * 10.0**places * (1 - 1e-13)) / 10.0**places


def _refuse(target: float, delta: float, reachable: float) -> UserError:
    return UserError(
        f"budget ε={target:g} cannot be met at δ={delta:g} beside what is already planned: smallest reachable "
        f"is {reachable:.4g} (raise the budget, or plan fewer or noisier metrics)"
    )


@lru_cache(maxsize=1 << 14)
def _effective_noise(
    target: float,
    delta: float,
    adjacency: Adjacency,
    rate: float,
    kinds: Kinds,
    rest: tuple[Gaussians, ...],
) -> float:
    """The noise multiplier in what the adversary sees, a touch on the safe side."""
    if rest and (fixed := epsilon_of(rest, delta, adjacency)[0]) >= target:
        raise _refuse(target, delta, fixed)
    if rate == 1 and all(g.rate == 1 for g in rest):
        left = gdp.mu_from_epsilon(target, delta) ** 2 - plain_mu(rest, adjacency) ** 2
        return adjacency.moves * math.sqrt(_weight(kinds) / left)
    return _search(target, delta, adjacency, rate, kinds, rest)


def _search(
    target: float, delta: float, adjacency: Adjacency, rate: float, kinds: Kinds, rest: tuple[Gaussians, ...]
) -> float:
    """Regula falsi on ln ε against ln z: on a coarse grid, then on the fine one in the worse direction."""
    from modicum.privacy.accounting import pld
    from modicum.privacy.accounting.pairs import directions

    def groups(log_z: float) -> tuple[Gaussians, ...]:
        return (*rest, *_groups(math.exp(log_z), rate, kinds))

    ways = directions(adjacency)

    def coarse(log_z: float) -> float:
        return pld.epsilon_one_way(groups(log_z), delta, ways[0], accuracy=pld.COARSE)

    start = _central_limit_guess(target, delta, adjacency, rate, _weight(kinds), rest)
    near = _root(coarse, start, target, 2 * pld.COARSE)
    worst = max(ways, key=lambda way: pld.epsilon_one_way(groups(near), delta, way, accuracy=pld.COARSE))

    def fine(log_z: float) -> float:
        return pld.epsilon_one_way(groups(log_z), delta, worst)

    return math.exp(_root(fine, near, target, _CLOSE))


def _central_limit_guess(
    target: float, delta: float, adjacency: Adjacency, rate: float, count: float, rest: tuple[Gaussians, ...]
) -> float:
    """ln z for which μ = q√K·√(e^{1/z²} − 1) (Bu et al. 2020) uses up what `rest` leaves of the budget."""
    shift = adjacency.moves

    def mu2(g: Gaussians) -> float:
        return shift**2 * g.count * g.rate**2 * math.expm1(min(g.noise_multiplier**-2, 50.0))

    budget = gdp.mu_from_epsilon(target, delta) ** 2
    left = max(budget - math.fsum(mu2(g) for g in rest), 0.01 * budget)
    return -0.5 * math.log(math.log1p(left / (shift**2 * count * rate**2)))


def _root(cost: Callable[[float], float], start: float, target: float, close: float) -> float:
    """ln z with cost in [target·(1−close), target]; cost falls in ln z, roughly like 1/z."""
    lowest, highest = math.log(_SMALLEST), math.log(_LARGEST)

    def gap(log_z: float) -> float:
        return max(math.log(max(cost(log_z), 1e-300) / target), -20.0)

    aim = -close / 2  # in the middle of the band
    at = min(max(start, lowest), highest)
    low: tuple[float, float] | None = None  # (ln z, gap) with too little noise
    high: tuple[float, float] | None = None  # with enough
    for step in range(60):
        g = gap(at)
        if -close <= g <= 0:
            return at
        if g > 0:
            low = (at, g)
        else:
            high = (at, g)
        if low is None and at == lowest:
            return at
        if high is None and at == highest:
            raise UserError(f"budget ε={target:g} cannot be met with any noise multiplier up to {_LARGEST:g}")
        if low is not None and high is not None:
            if high[0] - low[0] < 1e-7:
                break
            slope = (high[1] - low[1]) / (high[0] - low[0])
            at = low[0] + (aim - low[1]) / slope
            margin = 0.05 * (high[0] - low[0])
            at = min(max(at, low[0] + margin), high[0] - margin)
            if step % 4 == 3:
                at = (low[0] + high[0]) / 2
        else:
            at = min(max(at + (g - aim) * (1.05 if abs(g) > 0.1 else 1.3), lowest), highest)
    assert high is not None
    return high[0]
