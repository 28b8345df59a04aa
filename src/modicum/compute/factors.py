"""What each example's gradient is multiplied with, for clients whose bounds differ."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.compute.bounds import SHRINK, Auto
from modicum.core.parts import ClipRule


def clip_factors(norms: Tensor, bounds: Tensor, rule: ClipRule, dtype: torch.dtype) -> Tensor:
    """Factors in `dtype` from norms before clipping in float64; `bounds` broadcasts over them."""
    shrink = 1 - SHRINK * torch.finfo(dtype).eps
    if rule is ClipRule.AUTO:
        return (bounds / (norms + Auto.gamma) * shrink).to(dtype)
    return (bounds / norms * shrink).clamp(max=1.0).to(dtype)
