"""A bound that follows the median norm of what was released, without or with (naive) the noise in it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision, Released, ReleasedSum
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.errors import UserError
from modicum.policies.releases import releases_of

MEDIAN_LOSS = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, for normal errors
LARGEST = 1e12  # where the naive rule's bound stops: it has diverged long before


def _check(initial: float) -> None:
    if not 0 < initial < float("inf"):
        raise UserError(f"the first clipping bound must be positive and finite, got {initial}")


@dataclass(frozen=True)
class MedianNorm:
    """C ← h · median_i √max(0, ‖u_i‖² − dσ_i²)/g_i, from releases alone, hence free (post-processing).

    u_i is a released update, σ_i² its public noise variance a coordinate, g_i the update's norm per unit of what
    was clipped. Of a sum, the one norm of the sum is taken. C stays as it is where the squared median, give or
    take its own standard error, allows it; it moves by at most a factor of 2 a round and stays in
    [C₀/100, 100·C₀]. What is released was clipped before, so the estimate hardly exceeds C: a headroom h above 1
    lets the bound grow again.
    """

    initial: float = 1.0  # C₀
    headroom: float = 1.0  # h
    doubt: float = 1.0  # standard errors of the squared median that leave C as it is
    reach: float = 100.0
    step: float = 2.0

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def __post_init__(self) -> None:
        _check(self.initial)
        if not 0 < self.headroom < float("inf"):
            raise UserError(f"the headroom must be positive and finite, got {self.headroom}")
        if not (1 < self.step < float("inf") and 1 < self.reach < float("inf")):
            raise UserError(f"reach and step are factors above 1, got {self.reach} and {self.step}")

    def init(self, public: PublicFacts) -> State:
        return {"bound": self.initial}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"]))

    def observe(self, state: State, observed: Observation) -> State:
        releases = releases_of(observed)
        if not releases:
            return state
        square, error = _median_square(releases)
        C, doubt = state["bound"], self.doubt * error
        # C moves only as far as the doubt allows: noise grows with C, so a bound that followed the estimate itself
        # would be carried up by noise and then drown the signal that could bring it down.
        least = self.headroom * min(math.sqrt(max(square - doubt, 0.0)), C)
        most = self.headroom * math.sqrt(max(square + doubt, 0.0))
        target = min(max(C, least), most)
        target = min(max(target, C / self.step), C * self.step)
        return {"bound": min(max(target, self.initial / self.reach), self.initial * self.reach)}


@dataclass(frozen=True)
class NaiveMedianNorm:
    """C ← median_i ‖u_i‖/g_i as printed, with the noise left in. For faithful mode: the bound diverges.

    ‖u‖² is about ‖signal‖² + dσ² and σ is proportional to C, so C grows by a factor of about σ√d/(g·C) a round
    wherever that is above 1. Releases stay noised with the bound that clipped, so ε stays true; learning does not.
    Without `per_gain` an update's norm becomes a gradient's bound (FedCompDP, Eq. 7): C then falls to C_min where
    noise is small beside the signal, by 1 − g a round or more, and explodes elsewhere. It never stays.
    """

    initial: float = 1.0
    least: float = 1e-3  # C_min
    per_gain: bool = True  # divide by g_i, the update's norm per unit of what was clipped

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def __post_init__(self) -> None:
        _check(self.initial)
        _check(self.least)

    def init(self, public: PublicFacts) -> State:
        return {"bound": self.initial}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"]))

    def observe(self, state: State, observed: Observation) -> State:
        releases = releases_of(observed)
        gains = [r.facts.gain if self.per_gain else 1.0 for r in releases]
        norms = [r.update.double().norm().item() / g for r, g in zip(releases, gains, strict=True)]
        if not norms:
            return state
        return {"bound": min(max(statistics.median(norms), self.least), LARGEST)}


def _median_square(releases: Sequence[Released | ReleasedSum]) -> tuple[float, float]:
    """The median of the debiased squared norms on the scale of the bound, and its standard error.

    Var ‖u‖² = 2dσ⁴ + 4σ²‖signal‖². Only the half with the least noise, which is public, is asked: clients of small
    budgets would add noise and no knowledge. The median of m values has standard error √(π/2)·s/√m, where s² is
    the mean variance: an upper bound when variances differ.
    """
    known = sorted((_square(r) for r in releases), key=lambda pair: pair[1])
    half = known[: (len(known) + 1) // 2]
    if not half:
        return 0.0, 0.0
    loss = MEDIAN_LOSS if len(half) > 1 else 1.0
    variance = statistics.fmean(error**2 for _, error in half)
    return statistics.median(square for square, _ in half), loss * math.sqrt(variance / len(half))


def _square(r: Released | ReleasedSum) -> tuple[float, float]:
    """One debiased squared norm and its standard deviation."""
    variance, scale = r.facts.variance, r.facts.gain**2
    square = r.update.double().square().sum().item() - r.update.numel() * variance
    spread = 2 * r.update.numel() * variance**2 + 4 * variance * max(square, 0.0)
    return square / scale, math.sqrt(spread) / scale
