"""What each example's gradient is multiplied with, for clients whose bounds differ."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.clipping import Auto
from modicum.core.parts import ClipRule

SHRINK = 8  # as in modicum.clipping.bounds: rounding must not lift a clipped norm above its bound


def clip_factors(norms: Tensor, bounds: Tensor, rule: ClipRule) -> Tensor:
    """Factors from norms before clipping; `bounds` broadcasts over them."""
    shrink = 1 - SHRINK * torch.finfo(norms.dtype).eps
    if rule is ClipRule.AUTO:
        return bounds / (norms + Auto.gamma) * shrink
    return (bounds / norms * shrink).clamp(max=1.0)
