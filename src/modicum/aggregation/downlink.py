"""Noise that the server adds to what it sends out: NbAFL's second source of noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened
from modicum.core.parts import Aggregation, State


@dataclass(frozen=True)
class DownlinkNoise:
    """The base's model plus N(0, std²). Against a server that sees every message it adds no privacy."""

    base: Aggregation
    std: Callable[[PublicFacts], float] = field(repr=False)
    seed: int = 0

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        std = self.std(public)
        return {"std": std if math.isfinite(std) else 0.0, "round": 0, "base": self.base.init(public)}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        moved, base = self.base.combine(state["base"], model, opened, evaluate)
        round = state["round"]
        if state["std"] > 0:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + round)
            noise = torch.randn(moved.shape, generator=generator, dtype=torch.float64)
            moved = moved + state["std"] * noise.to(moved)
        return moved, {"std": state["std"], "round": round + 1, "base": base}
