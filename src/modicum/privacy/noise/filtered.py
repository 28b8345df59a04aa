"""Noise that a policy chooses during the run, under a filter that stops what would cost too much (R2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from modicum.privacy.accounting.calibration import calibrate_noise, round_up
from modicum.privacy.accounting.filters import filter_cap, price
from modicum.privacy.accounting.rdp import best_order, rdp_sampled_gaussian
from modicum.privacy.events import Origin
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases, chosen
from modicum.privacy.noise.stock import Stock
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan


@dataclass(frozen=True)
class Filtered(Schedule):
    """Any multiplier, or any order and number of a stock's kinds, as long as the filter's cap lasts."""

    stock: Stock | None = None

    adapts = True

    @property
    def scales(self) -> tuple[float, ...]:  # type: ignore[override]
        """The stock's kinds."""
        return () if self.stock is None else self.stock.scales

    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        """Under sampling one order α* is fixed now: the best for the planned steps at one constant noise."""
        order = None
        if of.sampler.chance is not None:
            z = calibrate_noise(of.spec, of.budget, of.sampler, of.steps, also=also)
            order = best_order(of.sampler.chance, of.spec.charged(z), of.steps, of.spec.delta)
        guard = Guard.GDP_FILTER if order is None else Guard.RDP_FILTER
        return PrivacyPlan(client=of.client, spec=of.spec, budget=of.budget, guard=guard, order=order)

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        if now.multiplier is not None or self.stock is None or plan.guard is Guard.NONE:
            return chosen(of, plan, now)
        turn = self.stock.in_turn(of.participations, now.participation)
        return self.of_kind(of, plan, turn if now.kind is None else now.kind), Origin.RELEASED

    def of_kind(self, of: TrainingReleases, plan: PrivacyPlan, kind: int) -> float:
        if self.stock is None or plan.guard is Guard.NONE:
            return plan.multiplier(of.purpose)
        return self.stock.scales[kind] * _to_the_end(of, plan)

    def participations(self, of: TrainingReleases) -> tuple[float, ...]:
        """How many the filter would let through of each kind alone."""
        if self.stock is None:
            return ()
        plan = self.agree(of, ())
        z, cap, steps = _to_the_end(of, plan), filter_cap(plan), of.steps // of.participations
        return tuple(cap / price(plan, scale * z, of.sampler, steps) for scale in self.stock.scales)


def _to_the_end(of: TrainingReleases, plan: PrivacyPlan) -> float:
    """z of the constant noise that a client's filter lets through to the end; kinds are multiples of it."""
    rate = of.sampler.chance or 1.0
    return filtered_noise(filter_cap(plan), plan.order, rate, of.spec.adjacency.moves, of.steps)


@lru_cache(maxsize=1 << 12)
def filtered_noise(cap: float, order: float | None, rate: float, moves: float, count: int) -> float:
    """The smallest z with which `count` equal releases stay within a filter's cap, rounded up (R2).

    Without an order the filter is GDP's and z is exact. `moves` is how far one unit moves an unsampled sum.
    """
    if order is None:
        return round_up(moves * math.sqrt(count / cap))
    low, high = 1e-2, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        if count * rdp_sampled_gaussian(rate, middle / moves, order) > cap:
            low = middle
        else:
            high = middle
        if high / low < 1 + 1e-9:
            break
    return round_up(high)
