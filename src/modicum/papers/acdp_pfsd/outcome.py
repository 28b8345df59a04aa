"""How a round went, as learning policies see it: two figures of the model and the size of what was released."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from modicum.core.needs import Need
from modicum.core.parts import Observation
from modicum.errors import UserError
from modicum.policies.releases import mean_update

OutcomeSource = Literal["public", "raw"]
WORST_LOSS = 10.0  # a noised model's loss can be anything; beyond this it says no more
LOWEST, HIGHEST = 10, 80  # percentiles between which clients' figures count (Defs. 5 and 6)


@dataclass(frozen=True)
class Outcome:
    """Accuracy and loss after a round, and the released mean update's norm over the bound, noise taken out."""

    accuracy: float
    loss: float
    size: float

    def gain_over(self, before: Outcome) -> float:
        """φ = φ_l + φ_a: fall of the loss plus rise of the accuracy. Eqs. (11)–(13)"""
        return (before.loss - self.loss) + (self.accuracy - before.accuracy)


def needs_of(source: OutcomeSource) -> tuple[Need, ...]:
    """Figures of public data need such data."""
    return (Need.PUBLIC_LABELS, Need.CLASSES) if source == "public" else ()


def outcome(observed: Observation, source: OutcomeSource) -> Outcome | None:
    """From public data and releases (sound), or from figures that clients sent in the clear (as published)."""
    figures = _public(observed) if source == "public" else _raw(observed)
    if figures is None:
        return None
    accuracy, loss = figures
    if not math.isfinite(loss):
        loss = WORST_LOSS
    return Outcome(accuracy, min(loss, WORST_LOSS), _size(observed))


def _public(observed: Observation) -> tuple[float, float]:
    if "accuracy" not in observed.public:
        raise UserError(
            "this clipping policy learns from public data with the task's own labels: give the federation a proxy"
        )
    return observed.public["accuracy"], observed.public["loss"]


def _raw(observed: Observation) -> tuple[float, float] | None:
    if not isinstance(observed.opened, tuple) or not observed.opened:
        return None
    return (
        middle_mean([r.metrics["accuracy"] for r in observed.opened]),
        middle_mean([r.metrics["loss"] for r in observed.opened]),
    )


def middle_mean(values: Sequence[float]) -> float:
    """Mean of the values between the 10th and the 80th percentile (Defs. 5 and 6); of very few their median."""
    array = np.nan_to_num(np.asarray(values, np.float64), nan=WORST_LOSS, posinf=WORST_LOSS)
    low, high = np.percentile(array, [LOWEST, HIGHEST])
    middle = array[(array >= low) & (array <= high)]
    return float(middle.mean() if len(middle) else np.median(array))


def _size(observed: Observation) -> float:
    """√max(0, ‖ū‖² − dσ²)/C of the mean released update ū, whose noise variance σ² is public."""
    if not observed.opened:
        return 0.0
    bound = max(d.bound for d in observed.decisions.values())
    mean, variance = mean_update(observed.opened)
    square = mean.double().square().sum().item() - mean.numel() * variance
    return math.sqrt(max(0.0, square)) / bound if math.isfinite(square) else 0.0
