"""One noise for all, and budgets met by how often a record is drawn: the mechanism of rPDP-FL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from modicum.core.parts import ClientFacts
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.calibration import calibrate_noise, largest_rate
from modicum.privacy.events import KnownTo, NoSampling, Poisson, Sampler
from modicum.privacy.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class SampledByBudget(RecordLocal):
    """Records enter a step with probability q(ε_i), the largest that ε_i allows at the common noise.

    The common noise is that of a client with budget `full_budget` whose records all take part in every step.
    """

    full_budget: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch is not None or self.steps is None:
            raise UserError("sampling by budget fixes the local steps and decides the batch: set steps, not batch")
        if not 0 < self.full_budget < math.inf:
            raise UserError(
                f"the budget of full participation must be positive and finite, got {self.full_budget}"
            )

    def sampler(self, facts: ClientFacts) -> Sampler:
        if facts.budget >= self.full_budget:
            return NoSampling()
        return Poisson(_rate(self.spec, facts.budget, self.full_budget, self.total_steps(facts)), KnownTo.CLIENT)

    def expected_batch(self, facts: ClientFacts) -> float:
        sampler = self.sampler(facts)
        return facts.records * (sampler.rate if isinstance(sampler, Poisson) else 1.0)


@lru_cache(maxsize=4096)
def _rate(spec: PrivacySpec, budget: float, full_budget: float, count: int) -> float:
    noise = calibrate_noise(spec, full_budget, NoSampling(), count)
    return largest_rate(spec, budget, Poisson(0.5, KnownTo.CLIENT), count, noise)
