"""One noise for all, and budgets met by how often a record is drawn: the mechanism of rPDP-FL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq

from modicum.core.facts import ClientFacts
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.accounting import rdp
from modicum.privacy.accounting.calibration import calibrate_noise, largest_rate
from modicum.privacy.events import NoSampling, Poisson, Sampler
from modicum.privacy.spec import LARGEST_BUDGET, PrivacySpec
from modicum.privacy.views import KnownTo

SIMULATED = 12  # pairs that a published curve goes through
EXPONENTS = np.linspace(0.05, 6.0, 120)
SMALLEST = 1e-4  # a fitted curve may fall below zero, and a rate may not


@dataclass(frozen=True, kw_only=True)
class SampledByBudget(RecordLocal):
    """Records enter a step with probability q(ε_i), the largest that ε_i allows at the common noise.

    The common noise is that of a client with budget `full_budget` whose records all take part in every step. With
    `fitted`, the rate is read off a curve through simulated pairs instead, as published.
    """

    full_budget: float = 1.0
    fitted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch is not None or self.steps is None:
            raise UserError("sampling by budget fixes the local steps and decides the batch: set steps, not batch")
        if not 0 < self.full_budget <= LARGEST_BUDGET:
            raise UserError(
                f"the budget of full participation must be positive and at most {LARGEST_BUDGET:g}, "
                f"got {self.full_budget}"
            )

    @property
    def takes_integers(self) -> bool:
        return False  # some clients' batches are drawn

    def _drawn_from(self, facts: ClientFacts) -> Sampler:
        """Poisson sampling at the largest rate that the client's budget allows; none at the full budget."""
        if facts.budget >= self.full_budget:
            return NoSampling()
        count = self.total_steps(facts)
        if self.fitted:
            rate = fitted_rate(facts.budget, self.full_budget, count, self.delta)
        else:
            rate = _rate(self.spec, facts.budget, self.full_budget, count)
        return Poisson(rate, KnownTo.CLIENT)

    def expected_batch(self, facts: ClientFacts) -> float:
        """Records times the rate: public, like both of them (R4)."""
        return facts.records * (self._drawn_from(facts).chance or 1.0)


@lru_cache(maxsize=4096)
def _rate(spec: PrivacySpec, budget: float, full_budget: float, count: int) -> float:
    noise = calibrate_noise(spec, full_budget, NoSampling(), count)
    return largest_rate(spec, budget, Poisson(0.5, KnownTo.CLIENT), count, noise)


@lru_cache(maxsize=1024)
def published_noise(full_budget: float, count: int, delta: float) -> float:
    """The noise at which Rényi accounting gives a client that always takes part its budget."""

    def excess(log_z: float) -> float:
        return rdp.epsilon(1.0, math.exp(log_z), count, delta) - full_budget

    return math.exp(float(brentq(excess, math.log(1e-2), math.log(1e7), xtol=1e-6)))


@lru_cache(maxsize=4096)
def fitted_rate(budget: float, full_budget: float, count: int, delta: float) -> float:
    """From ε = k·e^{aq} + c through simulated pairs (q, ε): easy to invert, and off by what the curve is off."""
    a, k, c = _published_curve(full_budget, count, delta)
    inside = (budget - c) / k
    return min(max(math.log(inside) / a, SMALLEST), 1.0) if inside > 0 else SMALLEST


@lru_cache(maxsize=256)
def _published_curve(full_budget: float, count: int, delta: float) -> tuple[float, float, float]:
    """Least squares in k and c for each exponent a of a grid; the best of them."""
    noise = published_noise(full_budget, count, delta)
    rates = np.linspace(0.02, 1.0, SIMULATED)
    budgets = np.array([rdp.epsilon(float(q), noise, count, delta) for q in rates])
    fits = []
    for a in np.concatenate([-EXPONENTS, EXPONENTS]):
        powers = np.stack([np.exp(a * rates), np.ones_like(rates)], 1)
        (k, c), *_ = np.linalg.lstsq(powers, budgets, rcond=None)
        fits.append((float(np.square(powers @ [k, c] - budgets).sum()), float(a), float(k), float(c)))
    return min(fits)[1:]
