"""The variance of the noise in a step, where the weights of what was released are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from modicum.core.messages import Opened, Released, ReleasedSum
from modicum.core.parts import Aggregation, State


@runtime_checkable
class Weighs(Protocol):
    """An aggregation that takes a weighted mean, with weights that are known before the messages are."""

    def weights_of(self, state: State, released: tuple[Released, ...]) -> Mapping[str, float]:
        """The weight of each client that answered; they need not sum to one."""


def step_variance(rule: Aggregation, state: State, opened: Opened) -> float:
    """lr²·Σ p_k²v_k of each coordinate, v_k public; of rules that weigh otherwise, as if they took the mean."""
    lr = float(getattr(rule, "lr", 1.0))
    if isinstance(opened, ReleasedSum):
        return lr**2 * opened.facts.variance
    if not opened:
        return 0.0
    weights = rule.weights_of(state, opened) if isinstance(rule, Weighs) else {r.client: 1.0 for r in opened}
    total = sum(weights.values())
    if not total > 0:
        return 0.0
    return lr**2 * sum((weights[r.client] / total) ** 2 * r.facts.variance for r in opened)
