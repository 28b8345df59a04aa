"""The variance of the noise in a step, where the weights of what was released are known."""

from __future__ import annotations

from collections.abc import Mapping

from modicum.aggregation.constraint_aware import ConstraintAware
from modicum.aggregation.noise_aware import NoiseAware
from modicum.aggregation.weighted import Weighted
from modicum.core.messages import Opened, Released, ReleasedSum
from modicum.core.parts import Aggregation, State


def step_variance(rule: Aggregation, state: State, opened: Opened) -> float:
    """lr²·Σ p_k²v_k of each coordinate, v_k public; of rules that weigh otherwise, as if they took the mean."""
    lr = float(getattr(rule, "lr", 1.0))
    if isinstance(opened, ReleasedSum):
        return lr**2 * opened.facts.variance
    weights = _weights(rule, state, opened)
    total = sum(weights.values())
    if not total > 0:
        return 0.0
    return lr**2 * sum((weights[r.client] / total) ** 2 * r.facts.variance for r in opened)


def _weights(rule: Aggregation, state: State, released: tuple[Released, ...]) -> Mapping[str, float]:
    if isinstance(rule, NoiseAware):
        return rule.weights(state, released)
    if isinstance(rule, ConstraintAware):
        return rule.weights(state, sorted(r.client for r in released)) if released else {}
    known = state["weights"] if isinstance(rule, Weighted) else {}
    return {r.client: known.get(r.client, 1.0) for r in released}
