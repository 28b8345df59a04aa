"""Convolutions as products of patches while gradients of gradients are taken.

Each message has a weight gradient of its own, which for a convolution is a grouped one with a group per message:
kernels are made for few, wide groups, and take many times as long as the same sums written as matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, pad
from torch.overrides import TorchFunctionMode


class AsProducts(TorchFunctionMode):
    """Within it, a plain 2-d convolution is the product of patches with weights; any other is left alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is conv2d and not kwargs and _plain(*args):
            return _product(*args)
        return func(*args, **(kwargs or {}))


def _plain(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001
    bias: Tensor | None = None,  # noqa: ARG001
    stride: Any = 1,  # noqa: ARG001
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Images in a batch, padding in numbers, no gaps, one group."""
    return x.ndim == 4 and not isinstance(padding, str) and _pair(dilation) == (1, 1) and groups == 1


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, *_: Any
) -> Tensor:
    (high, wide), (down, right), (top, left) = weight.shape[2:], _pair(stride), _pair(padding)
    wider = pad(x, (left, left, top, top))
    places = torch.arange(wider[0].numel(), device=x.device).view(wider.shape[1:])
    windows = places.unfold(1, high, down).unfold(2, wide, right).permute(1, 2, 0, 3, 4)
    # Gathered by index: of torch's own two ways to patches, one copies record by record on a GPU and the other
    # has no rule for many messages.
    patches = wider.flatten(1).index_select(1, windows.reshape(-1)).view(len(x), *windows.shape[:2], -1)
    return linear(patches, weight.flatten(1), bias).permute(0, 3, 1, 2)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
