"""Weights for clients of unequal budgets and sizes: the noisier an update, the less it counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.aggregation.weighted import weighted_mean
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, Released, ReleasedSum
from modicum.core.parts import State
from modicum.errors import UserError

TINY = 1e-30


@dataclass(frozen=True)
class NoiseAware:
    """The least expected error of Σ n_i·θ_i / Σ n_i where a release is θ_i and noise of variance v_i = d·σ_i².

    θ_i differ by τ² (squared norm) from one another. Best linear prediction shrinks each towards the mean by
    precision: with k_i = τ²/(τ² + v_i), a_i = s_i·k_i + (1 − Σ s_j·k_j)·p_i, where s_i is the client's share of
    records and p_i ∝ 1/(τ² + v_i). Without noise clients count by records, in much noise by precision, and clients
    of equal size always by p_i.

    σ_i² and n_i are public. τ² is estimated from the releases of *earlier* rounds (R7), so a round's weights do
    not depend on its own noise. Under non-IID data the weights lean towards clients with large budgets: read
    accuracy by budget group.
    """

    lr: float = 1.0
    memory: float = 0.8  # how much of the old estimate of τ² is kept in each round

    needs_individuals = True

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise UserError(f"the memory of the noise-aware weights must lie in [0, 1), got {self.memory}")

    def init(self, public: PublicFacts) -> State:
        records = {c.name: c.records for c in public.clients}
        # A running mean of estimates, and the weight it has gathered.
        return {"tau2": 0.0, "mass": 0.0, "records": records}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        if isinstance(opened, ReleasedSum):
            raise UserError("noise-aware weights need each client's update: use the view server-sees-messages")
        if not opened:
            return model, state
        weights = self.weights_of(state, opened)
        step = weighted_mean(opened, weights, model)
        return model + self.lr * step, self._learn(state, weights, opened, step)

    def weights_of(self, state: State, released: tuple[Released, ...]) -> dict[str, float]:
        """a_i of each client that answered; τ² is that of earlier rounds."""
        noise = {r.client: r.update.numel() * r.facts.variance for r in released}
        # Before anything is known: as much as the least noise.
        tau2 = (max(state["tau2"] / state["mass"], 0.0) if state["mass"] else min(noise.values())) + TINY
        precision = {name: 1 / (tau2 + v) for name, v in noise.items()}
        records = sum(state["records"][name] for name in noise)
        own = {name: state["records"][name] / records * tau2 * p for name, p in precision.items()}  # s_i·k_i
        shared = (1 - sum(own.values())) / sum(precision.values())
        return {name: own[name] + shared * precision[name] for name in noise}

    def _learn(
        self, state: State, weights: dict[str, float], released: tuple[Released, ...], mean: Tensor
    ) -> State:
        """Method of moments: with Σ a_i = 1, E Σ a_i‖u_i − ū‖² = Σ a_i(1−a_i)(τ² + dσ_i²)."""
        if len(released) < 2:
            return state
        seen = noise = share = 0.0
        for r in sorted(released, key=lambda r: r.client):
            a = weights[r.client]
            seen += a * torch.sum((r.update - mean).double().square()).item()
            noise += a * (1 - a) * r.update.numel() * r.facts.variance
            share += a * (1 - a)
        if not share > TINY:
            return state
        # Kept unclamped: the mean of estimates is unbiased, and only its use is cut off at zero.
        estimate = (seen - noise) / share
        keep = self.memory
        return {
            **state,
            "tau2": keep * state["tau2"] + (1 - keep) * estimate,
            "mass": keep * state["mass"] + (1 - keep),
        }
