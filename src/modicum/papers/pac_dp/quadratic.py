"""F(ε) = αε² + βε + γ as Algorithm 2 prints it, fitted or the paper's own: for faithful mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.errors import UserError
from modicum.papers.pac_dp.curve import Curve

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quadratic:
    """Coefficients by least squares of C itself: the curve may fall, and be no bound at all."""

    alpha: float
    beta: float
    gamma: float
    r2: float  # of C, as the paper states it

    def __call__(self, budget: float) -> float:
        return (self.alpha * budget + self.beta) * budget + self.gamma

    def __str__(self) -> str:
        return f"C = {self.alpha:.4g}·ε² {self.beta:+.4g}·ε {self.gamma:+.4g}, R² = {self.r2:.3f}"


PUBLISHED = {  # the paper fits no other dataset
    "mnist": Quadratic(-5.5235, 12.0719, 1.4004, 0.9806),  # falls beyond ε = 1.09
    "cifar-10": Quadratic(0.0426, 1.2900, 1.1060, 0.9490),
}


def least_squares(budgets: Vector, bounds: Vector) -> Quadratic:
    """The quadratic nearest to these pairs; a line or a constant where there are fewer than three."""
    found = np.polyfit(budgets, bounds, min(2, len(budgets) - 1))
    alpha, beta, gamma = (float(v) for v in np.concatenate([np.zeros(3 - len(found)), found]))
    return Quadratic(alpha, beta, gamma, r_squared(bounds, np.asarray(np.polyval(found, budgets), np.float64)))


def quadratic_of(curve: Curve, where: str) -> Quadratic:
    """That of a fitted curve: as stored, or from its pairs in files that are older than this."""
    if curve.scale_free or not curve.about.get("pairs"):
        raise UserError(f"{where} holds no pairs of budgets and bounds: fit it again with modicum fit-clipping")
    stored = curve.about.get("quadratic")
    if stored is not None:
        return Quadratic(**stored)
    budgets, bounds = (np.asarray(v, np.float64) for v in zip(*curve.about["pairs"], strict=True))
    return least_squares(budgets, bounds)


def r_squared(values: Vector, fitted: Vector) -> float:
    """Share of the values' spread that a fit explains; 1 or 0 where they do not spread."""
    spread = float(np.sum((values - values.mean()) ** 2))
    left = float(np.sum((values - fitted) ** 2))
    if spread < 1e-12:
        return 1.0 if left < 1e-12 else 0.0
    return 1 - left / spread


@dataclass(frozen=True)
class PrintedQuadratic:
    """C = αε² + βε + γ as printed: not monotone, not clamped, and refused where it is not positive."""

    quadratic: Quadratic
    origin: str

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def bound(self, budget: float) -> float:
        """What the quadratic says; what is no bound is refused."""
        value = self.quadratic(budget)
        if not 0 < value < math.inf:
            raise UserError(
                f"the quadratic of {self.origin} gives C = {value:.4g} at ε = {budget:g}, which is no bound: "
                "lower the budget, or use sound mode"
            )
        return value

    def init(self, public: PublicFacts) -> State:
        return {"bounds": {c.name: self.bound(c.budget) for c in public.clients}}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return {name: Decision(state["bounds"][name]) for name in clients}

    def observe(self, state: State, observed: Observation) -> State:
        return state
