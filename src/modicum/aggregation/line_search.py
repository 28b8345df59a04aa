"""How far to go along a step, asked of public records."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from modicum.aggregation.mean import Mean
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened
from modicum.core.needs import Need
from modicum.core.parts import Aggregation, State
from modicum.errors import UserError


@dataclass(frozen=True)
class LineSearch:
    """θ + a·Δ with the step Δ of another aggregation, a the share of it with the least loss on public records.

    Of equal losses, and without public records, the first share is taken. Post-processing, so it is free; but one
    step among several is picked by what this round released, so that its noise is no longer that of a plain mean.
    """

    base: Aggregation = field(default_factory=Mean)
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)

    needs = (Need.PUBLIC_LABELS,)

    def __post_init__(self) -> None:
        if not self.shares or not all(0 <= share < math.inf for share in self.shares):
            raise UserError(f"shares of a step are finite and at least 0, one or more, got {self.shares}")

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        return {"base": self.base.init(public)}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        stepped, base = self.base.combine(state["base"], model, opened, evaluate)
        candidates = [model + share * (stepped - model) for share in self.shares]
        if evaluate is None:
            return candidates[0], {"base": base}
        losses = [evaluate(candidate)["loss"] for candidate in candidates]
        best = min(range(len(losses)), key=lambda i: losses[i] if math.isfinite(losses[i]) else math.inf)
        return candidates[best], {"base": base}
