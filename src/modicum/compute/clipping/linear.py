"""A linear layer that shows its output's gradient by fewer calls, and without the copies that a hook would take.

A hook's tap works in place; on a layer's output over several places, which is a view, torch then copies each
gradient three times on its way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Show = Callable[[Tensor], None]
"""Gets the gradient of a layer's output."""

TURNED = "transformers.pytorch_utils.Conv1D"
"""GPT-2's linear layer, whose weight is (inputs, outputs); its package need not be installed."""


def is_turned(layer: nn.Module) -> bool:
    """Whether this is GPT-2's."""
    kind = type(layer)
    return f"{kind.__module__}.{kind.__qualname__}" == TURNED


def fits(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether `shown_linear` computes what this call would: in the layer's own precision, or in the one that
    a GPU is told to multiply in."""
    if len(args) != 1 or args[0].dim() < 2:
        return False
    x, weight = args[0], layer.weight
    if not torch.is_autocast_enabled(x.device.type):
        return bool(x.dtype == weight.dtype)
    return x.is_cuda and x.is_floating_point() and torch.float64 not in (x.dtype, weight.dtype)


def multiplied_in(x: Tensor) -> torch.dtype:
    """The precision in which a layer takes these inputs."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def shown_linear(layer: nn.Module, x: Tensor, taken: Tensor, anchor: Tensor, show: Show) -> Tensor:
    """The layer's output of (B, …, d) inputs; `show` is called in the backward pass.

    `taken` is `x` as the layer multiplies it, without its history.
    """
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    if is_turned(layer):
        weight = weight.t()
    output: Tensor = _Linear.apply(x, taken, weight, bias, anchor, show)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _x: Tensor, taken: Tensor, weight: Tensor, bias: Tensor | None, _anchor: Tensor, show: Show
    ) -> Tensor:
        weight, bias = weight.to(taken.dtype), None if bias is None else bias.to(taken.dtype)
        ctx.show = show
        ctx.save_for_backward(weight)
        output: Tensor = functional.linear(taken, weight, bias)
        if output._is_view():
            # Torch would refuse whoever works in place on a view that was made here; nobody has what it is one of.
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.show(gradient)
        (weight,) = ctx.saved_tensors
        found = None
        if ctx.needs_input_grad[0]:
            flat = gradient.reshape(-1, gradient.shape[-1])
            found = flat.mm(weight).view(*gradient.shape[:-1], weight.shape[1])
        return found, None, None, None, None, None
