"""The one function that training calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from modicum.clipping.bounds import Clip
from modicum.clipping.problem import ClippedSum, Loss
from modicum.clipping.reference import reference_clipped_sum


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    clip: Clip,
    *,
    weights: Tensor | None = None,
    parameters: Iterable[str] | None = None,
) -> ClippedSum:
    """Σ_i w_i·clip(∇ loss_i) over the batch, and the per-example norms before clipping."""
    return reference_clipped_sum(model, loss, x, y, clip, weights=weights, parameters=parameters)
