"""FedMAP's Eqs. (10), (11) and (16)–(18), term by term: what they say of a setting."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modicum.errors import UserError
from modicum.papers.fedmap.accounting import fedmap_epsilon


@dataclass(frozen=True)
class Setting:
    """What the bounds are made of; constants that nobody can know are 1 unless given."""

    rounds: int  # T
    share: float  # q = |S_t|/N
    sigma: float  # σ, the least of a run
    bound: float  # C
    batch: float  # B
    dimension: int  # d
    rate: float  # η
    delta: float = 1e-5
    smoothness: float = 1.0  # L
    curvature: float = 1.0  # μ
    gap: float = 1.0  # L(θ_1) − L*
    bias: float = 0.0  # ‖b‖, what clipping takes from the mean gradient
    spread: float = 1.0  # σ_g

    def __post_init__(self) -> None:
        whole = (self.rounds, self.dimension, self.sigma, self.bound, self.batch, self.rate, self.smoothness)
        if not all(0 < v < math.inf for v in (*whole, self.curvature)):
            raise UserError("rounds, dimension, σ, C, B, the rate, L and μ must be positive and finite")
        if not all(0 <= v < math.inf for v in (self.gap, self.bias, self.spread)):
            raise UserError("the gap, the bias and the spread of gradients must be finite and at least 0")
        if not (0 < self.share <= 1 and 0 < self.delta < 1):
            raise UserError("the share of clients lies in (0, 1] and δ in (0, 1)")

    @property
    def _variance(self) -> float:
        return self.spread**2 / self.batch

    @property
    def _noise(self) -> float:
        return self.dimension * self.sigma**2


def epsilon_bound(s: Setting) -> float:
    """Eq. (10) without its O(Tq³): min over α > 1 of αρ + ln(1/δ)/(α − 1) with ρ = Tq²/(2σ²)."""
    rho = s.rounds * s.share**2 / (2 * s.sigma**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / s.delta))  # at α = 1 + √(ln(1/δ)/ρ)


def epsilon_by_orders(s: Setting) -> float:
    """Eq. (8), on the six orders of the paper's accountant."""
    return fedmap_epsilon(s.share, s.sigma, s.rounds, s.delta)


def epsilon_of_a_step(s: Setting) -> float:
    """ε̂ of Eq. (11)."""
    return s.bound / s.sigma * math.sqrt(2 * math.log(1.25 / s.delta))


def theorem_1(s: Setting) -> dict[str, float]:
    """Eq. (16), smooth losses: the bound on the mean squared gradient, as its terms."""
    return {
        "optimisation": 2 * s.gap / (s.rounds * s.rate),
        "bias": 2 * s.smoothness * s.bias**2,
        "sampling": 2 * s.smoothness * s.rate * s._variance,
        "noise": 2 * s.smoothness * s.rate * s._noise,
    }


def theorem_2(s: Setting, printed: bool = True) -> dict[str, float]:
    """Eq. (17), strongly convex losses. As printed dσ² lacks the factor η that Eqs. (16) and (18) have."""
    if s.rate > 1 / (2 * s.smoothness):
        raise UserError(f"Theorem 2 needs a rate of at most 1/(2L) = {1 / (2 * s.smoothness):g}, got {s.rate:g}")
    scale = s.rate * s.smoothness / s.curvature
    return {
        "optimisation": max(0.0, 1 - s.curvature * s.rate) ** s.rounds * s.gap,
        "bias": scale * s.bias**2,
        "sampling": scale * s.rate * s._variance,
        "noise": scale * s._noise * (1.0 if printed else s.rate),
    }


def surrogate(s: Setting) -> dict[str, float]:
    """U of Eq. (18), for one round."""
    return {
        "bias": s.smoothness * s.bias**2,
        "sampling": s.smoothness * s.rate * s._variance,
        "noise": s.smoothness * s.rate * s._noise,
    }
