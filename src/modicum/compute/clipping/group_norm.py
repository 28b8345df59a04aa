"""Group normalisation whose backward pass gives each example's parameter gradients along with the input's.

Both come from the same two sums over places, for each example and channel, and the statistics of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PRECISE = (torch.float32, torch.float64)

Show = Callable[[Tensor, Tensor, Tensor], None]
"""Gets the gradient of the output, and each example's gradients of weight and bias, (B, channels) both."""


def fits(layer: nn.GroupNorm, args: tuple[Any, ...]) -> bool:
    """Whether `normalise` computes what this call would, faster, and gradients precise enough to be added up."""
    if len(args) != 1 or type(layer) is not nn.GroupNorm:
        return False
    x = args[0]
    # On a CPU torch's own operator works in any layout, and nobody fuses what is written by hand.
    return x.dtype == layer.weight.dtype and x.dtype in PRECISE and (x.is_cuda or x.is_contiguous())


def normalise(x: Tensor, layer: nn.GroupNorm, anchor: Tensor, show: Show) -> Tensor:
    """The layer's output; `show` is called in the backward pass."""
    output: Tensor = _GroupNorm.apply(  # type: ignore[no-untyped-call]
        x, layer.weight.detach(), layer.bias.detach(), anchor, layer.num_groups, layer.eps, show
    )
    return output


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, _anchor: Tensor, groups: int, eps: float, show: Show
    ) -> Tensor:
        way = _native if x.is_contiguous() else _by_hand
        output, mean, rstd = way(x, weight, bias, groups, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.show = show
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        way = _native_back if x.is_contiguous() else _back_by_hand
        back, by_weight, by_bias = way(gradient, x, weight, mean, rstd, ctx.needs_input_grad[0])
        ctx.show(gradient, by_weight, by_bias)
        return (back, *(None,) * 6)


def _native(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels = x.shape[:2]
    places = x[0, 0].numel()
    found: tuple[Tensor, Tensor, Tensor] = torch.native_group_norm(
        x, weight, bias, batch, channels, places, groups, eps
    )
    return found


def _native_back(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The batch as one example that has all channels: its gradients by channel are those by example."""
    batch, channels = x.shape[:2]
    one = (1, batch * channels, x[0, 0].numel())
    back, by_weight, by_bias = torch.ops.aten.native_group_norm_backward(
        g.reshape(one),
        x.view(one),
        mean.view(1, -1),
        rstd.view(1, -1),
        weight.repeat(batch),
        *one,
        mean.numel(),
        (wanted, True, True),
    )
    return back.view(x.shape) if wanted else None, by_weight.view(batch, -1), by_bias.view(batch, -1)


def _by_hand(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The native operator of a GPU knows contiguous memory alone; this keeps any layout, for a compiler to fuse.

    Channels one by one, then groups of them: with channels last, neighbours in memory are read together.
    """
    grouped = _grouped(x, groups)
    shape = (*grouped.shape[:2], *(1,) * (x.dim() - 1))
    variance, mean = torch.var_mean(grouped.reshape(*grouped.shape[:3], -1), dim=3, correction=0)
    centre = mean.mean(2, keepdim=True)
    rstd = ((variance + (mean - centre).square()).mean(2) + eps).rsqrt().view(shape)
    mean = centre.view(shape)
    standard = ((grouped - mean) * rstd).flatten(1, 2)
    wide = (-1, *(1,) * (x.dim() - 2))
    return standard * weight.view(wide) + bias.view(wide), mean, rstd


def _back_by_hand(
    g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    batch, groups = mean.shape[:2]
    g, x = (_grouped(t, groups) for t in (g, x))
    standard = (x - mean) * rstd
    sums = [t.reshape(*t.shape[:3], -1).sum(3) for t in (g * standard, g)]
    by_weight, by_bias = (t.view(batch, -1) for t in sums)
    if not wanted:
        return None, by_weight, by_bias
    along, level = ((weight.view(groups, -1) * t).sum(2).view(mean.shape) * (groups / x[0].numel()) for t in sums)
    wide = weight.view(*x.shape[1:3], *(1,) * (x.dim() - 3))
    return ((g * wide - level - standard * along) * rstd).flatten(1, 2), by_weight, by_bias


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.view(x.shape[0], groups, -1, *x.shape[2:])
