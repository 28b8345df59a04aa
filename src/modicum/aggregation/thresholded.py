"""Small coordinates of a noised step are left out: FedCompDP's gradient thresholding, after the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.aggregation.mean import Mean
from modicum.aggregation.noise_of import step_variance
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened
from modicum.core.parts import Aggregation, State
from modicum.errors import UserError


@dataclass(frozen=True)
class Thresholded:
    """Δ_i·1[|Δ_i| ≥ τ_t] of another aggregation's step Δ (FedCompDP, Eq. 2), which costs nothing after the noise.

    τ_t = κ_t·s with the public standard deviation s of a coordinate's noise. κ_t falls from start·√(2 ln d) in the
    first round to nothing after the last: at start = 1 the largest of d noises just passes at first, so that what
    remains is signal, and later steps keep their small parts.
    """

    base: Aggregation = field(default_factory=Mean)
    start: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.start < math.inf:
            raise UserError(f"the threshold's start must be finite and at least 0, got {self.start}")

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        most = self.start * math.sqrt(2 * math.log(max(public.dimension, 2)))
        return {"base": self.base.init(public), "most": most, "rounds": public.rounds, "round": 0}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        variance = step_variance(self.base, state["base"], opened)
        stepped, base = self.base.combine(state["base"], model, opened, evaluate)
        kappa = state["most"] * max(0.0, 1 - state["round"] / state["rounds"])
        step = stepped - model
        kept = torch.where(step.abs() >= kappa * math.sqrt(variance), step, 0.0)
        return model + kept, {**state, "base": base, "round": state["round"] + 1}
