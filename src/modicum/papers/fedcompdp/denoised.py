"""A noised step drawn towards zero by what its noise explains of its length."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.aggregation.mean import Mean
from modicum.aggregation.noise_of import step_variance
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened
from modicum.core.parts import Aggregation, State


@dataclass(frozen=True)
class Denoised:
    """Δ·max(0, 1 − (d−2)·v/‖Δ‖²) of another aggregation's step Δ, one tensor of the model at a time.

    The positive part of James and Stein (1961): of a Gaussian vector in d > 2 dimensions with variance v it errs
    less than the vector itself, wherever the mean is. v is public. Post-processing, so it is free.
    """

    base: Aggregation = field(default_factory=Mean)

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        return {
            "base": self.base.init(public),
            "sizes": [size for _, size in public.tensors] or [public.dimension],
        }

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        variance = step_variance(self.base, state["base"], opened)
        stepped, base = self.base.combine(state["base"], model, opened, evaluate)
        parts = [james_stein(part, variance) for part in torch.split(stepped - model, state["sizes"])]
        return model + torch.cat(parts), {**state, "base": base}


def james_stein(step: Tensor, variance: float) -> Tensor:
    """The positive-part estimator of the mean of N(mean, variance·I) from one draw; as it is up to d = 2."""
    square = float(step.double().square().sum())
    if step.numel() <= 2 or not square > 0:
        return step
    return step * max(0.0, 1 - (step.numel() - 2) * variance / square)
