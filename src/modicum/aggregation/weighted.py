"""A mean with public weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, Released, ReleasedSum
from modicum.core.parts import State
from modicum.errors import UserError


@dataclass(frozen=True)
class Weighted:
    """θ + lr · Σ w_i·u_i / Σ w_i over those who answered, w_i given or the public number of records n_i.

    Weighting after the noise is post-processing (R7). A sum has fixed its weights before the noise, so unequal
    weights are refused there.
    """

    lr: float = 1.0
    weights: Mapping[str, float] | None = field(default=None, hash=False)  # None: n_i

    def __post_init__(self) -> None:
        for name, weight in (self.weights or {}).items():
            if not 0 <= weight < float("inf"):
                raise UserError(f"the weight of client {name!r} must be finite and at least 0, got {weight}")

    @property
    def needs_individuals(self) -> bool:
        return self.weights is None or len(set(self.weights.values())) > 1

    def init(self, public: PublicFacts) -> State:
        weights = {c.name: float(c.records) for c in public.clients} if self.weights is None else self.weights
        missing = [c.name for c in public.clients if c.name not in weights]
        if missing:
            raise UserError(f"no weight is given for client {missing[0]!r}: give one for each client, or none")
        return {"weights": dict(weights)}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        if isinstance(opened, ReleasedSum):
            return model + self.lr * opened.update, state
        return model + self.lr * weighted_mean(opened, state["weights"], model), state

    def weights_of(self, state: State, released: tuple[Released, ...]) -> dict[str, float]:
        """w_i of each client that answered."""
        return {r.client: state["weights"].get(r.client, 1.0) for r in released}


def weighted_mean(released: tuple[Released, ...], weights: Mapping[str, float], model: Tensor) -> Tensor:
    """Σ w_i·u_i / Σ w_i in a fixed order; zero where all weights are."""
    ordered = sorted(released, key=lambda r: r.client)
    total = sum(weights[r.client] for r in ordered)
    if not total > 0:
        return torch.zeros_like(model)
    shares = torch.tensor([weights[r.client] / total for r in ordered], dtype=model.dtype, device=model.device)
    return shares @ torch.stack([r.update for r in ordered])
