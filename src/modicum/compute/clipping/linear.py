"""A linear layer of one place a record that shows its output's gradient by fewer calls than a hook would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Show = Callable[[Tensor], None]
"""Gets the gradient of a layer's output."""


def fits(layer: nn.Linear, args: tuple[Any, ...]) -> bool:
    """Whether `shown_linear` computes what this call would: rows of the layer's own precision on a CPU."""
    if len(args) != 1:
        return False
    x = args[0]
    alike = x.dim() == 2 and x.dtype == layer.weight.dtype and x.device.type == "cpu"
    return alike and not torch.is_autocast_enabled("cpu")


def shown_linear(layer: nn.Linear, x: Tensor, anchor: Tensor, show: Show) -> Tensor:
    """The layer's output of (B, d) inputs; `show` is called in the backward pass."""
    output: Tensor = _Linear.apply(x, layer.weight, layer.bias, anchor, show)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _anchor: Tensor, show: Show) -> Tensor:
        ctx.show = show
        ctx.save_for_backward(weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.show(gradient)
        (weight,) = ctx.saved_tensors
        return gradient.mm(weight) if ctx.needs_input_grad[0] else None, None, None, None, None
