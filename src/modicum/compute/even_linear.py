"""Linear layers of which every row is computed in one way, wherever it stands in its batch.

Where rows begin at odd addresses, matrix libraries add up each row's products in an order that
depends on where it begins. A record more in a batch moves all that follow it, and a model may be chosen that
magnifies their last bits: one record would then move everybody's gradient. Filled up with zeros to whole cache
lines, all rows begin alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LINE = 16
"""Numbers of a cache line: 64 bytes of float32."""

ALIKE = 4
"""Rows of a multiple of so many numbers were found to be added up alike."""

Show = Callable[[Tensor], None]
"""Gets the gradient of a layer's output."""


def needs_filling(layer: nn.Linear) -> bool:
    """Whether rows of a layer, or of its gradients, may be added up in several orders."""
    return uneven_sizes(layer.in_features, layer.out_features)


def uneven_sizes(size: int, out: int, apart: int = 0) -> bool:
    """Whether rows of so many numbers, which begin `apart` from one another if not side by side, may be multiplied
    with a matrix of so many columns in several orders. Wide ones too: with four threads, or by MKL's oldest
    instructions."""
    return bool(size % ALIKE or out % ALIKE or apart % ALIKE)


def uneven(layer: nn.Module) -> bool:
    """Whether this is a linear layer, as torch computes them, whose rows have to be filled up."""
    return (
        isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and "forward" not in vars(layer)
        and needs_filling(layer)
    )


def filled(t: Tensor, more: int, below: int = 0) -> Tensor:
    """Zeros at the end of each row, and rows of zeros below a matrix."""
    return functional.pad(t, (0, more, 0, below) if below else (0, more)) if more or below else t


def even_linear(layer: nn.Linear, *args: Any, **keywords: Any) -> Tensor:
    """The layer's output; zeros in place of what fills up inputs and outputs change no number's value."""
    if keywords or len(args) != 1 or args[0].is_cuda or not needs_filling(layer):
        return nn.Linear.forward(layer, *args, **keywords)
    return _product(args[0], _filled_weight(layer.weight), layer.bias, layer.weight.shape)


def _filled_weight(weight: Tensor) -> Tensor:
    out, size = weight.shape
    return filled(weight, -size % LINE, -out % LINE)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, shape: torch.Size) -> Tensor:
    """What a layer of this shape computes, by its weight that is filled up."""
    out, size = shape
    found = functional.linear(filled(x, -size % LINE), weight)[..., :out]
    return found.contiguous() if bias is None else found + bias


def fits(layer: nn.Linear, args: tuple[Any, ...]) -> bool:
    """Whether `shown_linear` computes what this call would: rows of the layer's own precision on a CPU."""
    if len(args) != 1:
        return False
    x = args[0]
    alike = x.dim() == 2 and x.dtype == layer.weight.dtype and x.device.type == "cpu"
    return alike and not torch.is_autocast_enabled("cpu")


def shown_linear(layer: nn.Linear, x: Tensor, anchor: Tensor, show: Show) -> Tensor:
    """The same output of (B, d) inputs by fewer calls; `show` is called in the backward pass."""
    output: Tensor = _Linear.apply(x, layer.weight, layer.bias, anchor, needs_filling(layer), show)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """The products of `even_linear`, or of a layer that needs no filling up, forth and back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _anchor: Tensor, fill: bool, show: Show
    ) -> Tensor:
        ctx.show, ctx.fill, ctx.shape = show, fill, weight.shape
        x = x.contiguous()  # rows of a part of something wider would begin anywhere
        if not fill:
            ctx.save_for_backward(weight)
            return functional.linear(x, weight, bias)
        even = _filled_weight(weight)
        ctx.save_for_backward(even)
        return _product(x, even, bias, weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.contiguous()
        ctx.show(gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        (weight,) = ctx.saved_tensors
        if not ctx.fill:
            return gradient.mm(weight), None, None, None, None, None
        out, size = ctx.shape
        back = filled(gradient, -out % LINE).mm(weight)[:, :size].contiguous()
        return back, None, None, None, None, None


@contextmanager
def evened(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All uneven linear layers of a model's modules, trained or not, are filled up for a while."""
    found = [part for part in modules if uneven(part)]
    for part in found:
        part.forward = partial(even_linear, part)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for part in found:
            del part.forward
