"""The plain mean of what was released."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, ReleasedSum
from modicum.core.parts import State


@dataclass(frozen=True)
class Mean:
    """θ + lr · mean of the updates, over those who answered (R7: weights after the noise are free)."""

    lr: float = 1.0
    needs_individuals = False

    def init(self, public: PublicFacts) -> State:
        return {}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        if isinstance(opened, ReleasedSum):
            return model + self.lr * opened.update, state
        if not opened:
            return model, state
        ordered = sorted(opened, key=lambda r: r.client)
        return model + self.lr * torch.stack([r.update for r in ordered]).mean(0), state
