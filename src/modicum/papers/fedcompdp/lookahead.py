"""FedACG's server: clients begin where momentum is about to lead (Kim et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.aggregation.mean import Mean
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened
from modicum.core.parts import Aggregation, State
from modicum.errors import UserError


@dataclass(frozen=True)
class Lookahead:
    """θ⁺ = φ + Δ, m⁺ = λm + Δ, and φ⁺ = θ⁺ + λm⁺ is sent out; θ⁺ is the model that counts.

    Δ is the step of another aggregation from φ. Post-processing, so it is free.
    """

    base: Aggregation = field(default_factory=Mean)
    momentum: float = 0.85  # λ

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UserError(f"the momentum of the lookahead must lie in [0, 1), got {self.momentum}")

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        return {"base": self.base.init(public), "velocity": None, "ahead": None}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        reached, base = self.base.combine(state["base"], model, opened, evaluate)
        velocity = state["velocity"] if state["velocity"] is not None else torch.zeros_like(model)
        velocity = self.momentum * velocity + (reached - model)
        ahead = self.momentum * velocity
        return reached + ahead, {"base": base, "velocity": velocity, "ahead": ahead}

    def reported(self, state: State, model: Tensor) -> Tensor:
        """θ, of which the broadcast φ is ahead."""
        return model if state["ahead"] is None else model - state["ahead"]
