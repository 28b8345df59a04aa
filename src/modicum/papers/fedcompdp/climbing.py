"""Sharpness-aware training where every step is released (Foret et al. 2021, along released gradients)."""

from __future__ import annotations

from dataclasses import dataclass

from modicum.errors import UserError
from modicum.training.plain import Supervised


@dataclass(frozen=True)
class Climbing(Supervised):
    """Minimises the loss a little uphill: gradients are taken at θ + ρ·g̃/‖g̃‖.

    g̃ is the gradient that the same client released in the step before, so that the climb itself is free.
    """

    ascent: float = 0.05  # ρ

    def __post_init__(self) -> None:
        if not 0 < self.ascent < float("inf"):
            raise UserError(f"the radius of the step uphill must be positive and finite, got {self.ascent}")
