"""Weights for clients of unequal budgets: the noisier an update, the less it counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.aggregation.weighted import weighted_mean
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, Released, ReleasedSum
from modicum.core.parts import State
from modicum.core.sockets import PublicEvaluator
from modicum.errors import UserError

TINY = 1e-30


@dataclass(frozen=True)
class NoiseAware:
    """w_i ∝ 1/(τ² + d·σ_i²): the least variance when updates differ by τ² (squared norm) beside their noise.

    σ_i² is public. τ² is estimated from the releases of *earlier* rounds (R7), so a round's weights do not depend
    on its own noise. Under non-IID data the weights lean towards clients with large budgets: read accuracy by
    budget group.
    """

    lr: float = 1.0
    memory: float = 0.8  # how much of the old estimate of τ² is kept in each round

    needs_individuals = True

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise UserError(f"the memory of the noise-aware weights must lie in [0, 1), got {self.memory}")

    def init(self, public: PublicFacts) -> State:  # noqa: ARG002
        return {"tau2": 0.0, "mass": 0.0}  # a running mean of estimates, and the weight it has gathered

    def combine(
        self,
        state: State,
        model: Tensor,
        opened: Opened,
        evaluate: PublicEvaluator | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, State]:
        if isinstance(opened, ReleasedSum):
            raise UserError("noise-aware weights need each client's update: use the view server-sees-messages")
        if not opened:
            return model, state
        weights = self.weights(state, opened)
        step = weighted_mean(opened, weights, model)
        return model + self.lr * step, self._learn(state, weights, opened, step)

    def weights(self, state: State, released: tuple[Released, ...]) -> dict[str, float]:
        """1/(τ² + d·σ_i²) for each client that answered, not normalised; τ² is that of earlier rounds."""
        noise = {r.client: r.update.numel() * r.facts.variance for r in released}
        # Before anything is known: as much as the least noise.
        tau2 = max(state["tau2"] / state["mass"], 0.0) if state["mass"] else min(noise.values())
        return {name: 1 / (tau2 + n + TINY) for name, n in noise.items()}

    def _learn(
        self, state: State, weights: dict[str, float], released: tuple[Released, ...], mean: Tensor
    ) -> State:
        """Method of moments: with a_i = w_i/Σw, E Σ a_i‖u_i − ū‖² = Σ a_i(1−a_i)(τ² + dσ_i²)."""
        if len(released) < 2:
            return state
        total = sum(weights.values())
        seen = noise = share = 0.0
        for r in sorted(released, key=lambda r: r.client):
            a = weights[r.client] / total
            seen += a * torch.sum((r.update - mean).double().square()).item()
            noise += a * (1 - a) * r.update.numel() * r.facts.variance
            share += a * (1 - a)
        if not share > TINY:
            return state
        # Kept unclamped: the mean of estimates is unbiased, and only its use is cut off at zero.
        estimate = (seen - noise) / share
        keep = self.memory
        return {
            "tau2": keep * state["tau2"] + (1 - keep) * estimate,
            "mass": keep * state["mass"] + (1 - keep),
        }
