"""Supervised training that is held back to the model it began with (FedProx, Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from modicum.errors import UserError
from modicum.training.plain import Supervised


@dataclass(frozen=True)
class Proximal(Supervised):
    """Minimises the mean loss plus μ/2·‖θ − θ_t‖², θ_t the model that the round began with."""

    mu: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise UserError(f"the proximal weight μ must be finite and at least 0, got {self.mu}")

    def pull(self, theta: Tensor, start: Tensor) -> Tensor:
        return self.mu * (theta - start)
