"""Momentum on the server, over any other aggregation: post-processing, so it is free."""

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
class Momentum:
    """v ← β·v + Δ, θ ← θ + v, with the step Δ of another aggregation (FedAvgM, Hsu et al. 2019)."""

    base: Aggregation = field(default_factory=Mean)
    beta: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise UserError(f"server momentum must lie in [0, 1), got {self.beta}")

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        return {"base": self.base.init(public), "velocity": None}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        stepped, base = self.base.combine(state["base"], model, opened, evaluate)
        velocity = state["velocity"] if state["velocity"] is not None else torch.zeros_like(model)
        velocity = self.beta * velocity + (stepped - model)
        return model + velocity, {"base": base, "velocity": velocity}
