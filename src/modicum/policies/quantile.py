"""A bound that follows a quantile of the norms, by noisy bits that say who was not clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.parts import Observation, Place, Scope, Signal, SignalName, State
from modicum.errors import UserError

BIT_VARIANCE = 1 / 12  # what a share of unclipped units varies by when nothing is known about it
REACH = 1e6  # the bound stays within this factor of the first one, whatever the noise does


@dataclass(frozen=True)
class AdaptiveQuantile:
    """C ← C · exp(−η·w·(b̄ − γ)), one bound for all (Andrew et al. 2021, Alg. 1).

    b̄ is the noisy share of units with norm ≤ C. Its bits are a block of the same query as the gradient or update,
    so they share its sampler draw and its event, and their price is `ratio` (10: 0.5% more noise on the rest).
    Both noise scales are frozen and the noise is drawn with the bound that clipped (R1). w = v/(v + s²), with the
    noise variance s² of b̄ known from the plan and v = 1/12, keeps the step's sign unbiased and its spread below
    η/7 however noisy the bits are.
    """

    initial: float = 1.0  # C₀
    quantile: float = 0.5  # γ
    rate: float = 0.2  # η
    ratio: float = 10.0  # noise multiplier of the bits over that of the whole query

    scope = Scope.ROUND
    place = Place.SERVER

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise UserError(f"the first clipping bound must be positive and finite, got {self.initial}")
        if not 0 < self.quantile < 1:
            raise UserError(f"the target quantile must lie strictly between 0 and 1, got {self.quantile}")
        if not 0 < self.rate <= 2:
            raise UserError(f"the rate of the quantile's update must lie in (0, 2], got {self.rate}")
        if not 1 < self.ratio < float("inf"):
            raise UserError(f"the bits' noise ratio must be above 1 and finite, got {self.ratio}")

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (Signal(SignalName.CLIP_BIT, self.ratio),)

    def init(self, public: PublicFacts) -> State:
        return {"bound": self.initial}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"]))

    def observe(self, state: State, observed: Observation) -> State:
        seen = observed.signal(SignalName.CLIP_BIT)
        if seen is None:
            return state
        share, variance = seen
        weight = BIT_VARIANCE / (BIT_VARIANCE + variance)
        bound = state["bound"] * math.exp(-self.rate * weight * (share - self.quantile))
        return {"bound": min(max(bound, self.initial / REACH), self.initial * REACH)}
