"""Small linear layers of which every row is computed in one way, wherever it stands in its batch.

Where rows of few numbers begin at odd addresses, matrix libraries add up each row's products in an order that
depends on where it begins. A record more in a batch moves all that follow it, and a model may be chosen that
magnifies their last bits: one record would then move everybody's gradient. Filled up with zeros to whole cache
lines, all rows begin alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

LINE = 16
"""Numbers of a cache line: 64 bytes of float32."""

ALIKE = 4
"""Rows of a multiple of so many numbers were found to be added up alike."""


def uneven(layer: nn.Module) -> bool:
    """Whether rows of a layer, or of its gradients, may be added up in several orders; wide ones are not."""
    if (
        not isinstance(layer, nn.Linear)
        or type(layer).forward is not nn.Linear.forward
        or "forward" in vars(layer)
    ):
        return False
    return uneven_sizes(layer.in_features, layer.out_features)


def uneven_sizes(size: int, out: int, apart: int = 0) -> bool:
    """Whether rows of so many numbers, which begin `apart` from one another if not side by side, may be multiplied
    with a matrix of so many columns in several orders."""
    return min(size, out) < LINE and bool(size % ALIKE or out % ALIKE or apart % ALIKE)


def even_linear(layer: nn.Linear, *args: Any, **keywords: Any) -> Tensor:
    """The layer's output; zeros in place of what fills up inputs and outputs change no number's value."""
    if keywords or len(args) != 1 or args[0].is_cuda:
        return nn.Linear.forward(layer, *args, **keywords)
    out, size = layer.weight.shape
    x = functional.pad(args[0], (0, -size % LINE))
    weight = functional.pad(layer.weight, (0, -size % LINE, 0, -out % LINE))
    found = functional.linear(x, weight)[..., :out]
    return found.contiguous() if layer.bias is None else found + layer.bias


@contextmanager
def evened(model: nn.Module) -> Iterator[None]:
    """All small linear layers of the model, trained or not, are filled up for a while."""
    small = [part for part in model.modules() if uneven(part)]
    for part in small:
        part.forward = partial(even_linear, part)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for part in small:
            del part.forward
