"""A server step that falls along a cosine, over any other aggregation: post-processing, so it is free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from modicum.aggregation.mean import Mean
from modicum.core.messages import Opened
from modicum.core.parts import Aggregation, PublicFacts, State


@dataclass(frozen=True)
class Decay:
    """θ ← θ + ½(1 + cos(πt/T))·Δ, with the step Δ of another aggregation: late rounds average their noise away."""

    base: Aggregation = field(default_factory=Mean)

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        return {"base": self.base.init(public), "taken": 0, "rounds": public.rounds}

    def combine(self, state: State, model: Tensor, opened: Opened) -> tuple[Tensor, State]:
        stepped, base = self.base.combine(state["base"], model, opened)
        share = 0.5 * (1 + math.cos(math.pi * state["taken"] / state["rounds"]))
        return model + share * (stepped - model), {**state, "base": base, "taken": state["taken"] + 1}
