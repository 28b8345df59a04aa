"""Synthetic rows and weights in the shapes of a batch: what is looked at instead of records.

What a probe decides is the route by which everybody's gradients are computed. If it read a record, that record
could change everybody's route, and with it the last bits that a model may be made to magnify.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from modicum.compute.clipping.problem import rows

NAMED = 2
"""What a whole number is drawn below where no embedding says more: labels, kinds and masks have both."""


def synthetic_rows(model: nn.Module, x: Any, y: Any, number: int, drawn: torch.Generator) -> tuple[Any, Any]:
    """So many rows of inputs and targets in the shapes, types and layout of these, of which no number is read.

    Real numbers lie between 0 and 1. Whole ones are 0 or 1; where an embedding looks them up, any that it has.
    """
    leaves, tree = tree_flatten((x, y))
    found = [_numbers_like(leaf, number, drawn, NAMED) for leaf in leaves]
    for i, size in looked_up(model, found, tree).items():
        found[i] = _numbers_like(leaves[i], number, drawn, size)
    rows_of: tuple[Any, Any] = tree_unflatten(found, tree)
    return rows_of


def _numbers_like(leaf: Any, number: int, drawn: torch.Generator, below: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    shape = (number, *leaf.shape[1:])
    if leaf.is_floating_point() or leaf.is_complex():
        return _laid_out_like(leaf, shape).copy_(torch.rand(shape, generator=drawn))
    numbers = torch.randint(below, shape, generator=drawn)
    if below == NAMED and leaf.dim() > 1 and leaf.shape[-1] > 1:
        numbers[..., 0], numbers[..., 1] = 1, 0  # whichever of the two a mask hides, a row keeps something
    return _laid_out_like(leaf, shape).copy_(numbers)


def _laid_out_like(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(leaf) == shape[0]:
        return torch.empty_like(leaf)
    last = leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=leaf.dtype, device=leaf.device, memory_format=layout)


def looked_up(model: nn.Module, leaves: list[Any], tree: Any) -> dict[int, int]:
    """Which of the inputs' leaves embeddings are asked for, and of how many rows each has at least."""
    where = {leaf.untyped_storage().data_ptr(): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    found: dict[int, int] = {}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(layer, nn.Embedding)
        i = where.get(args[0].untyped_storage().data_ptr()) if args else None
        if i is not None:
            found[i] = min(layer.num_embeddings, found.get(i, layer.num_embeddings))

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.Embedding)]
    if not hooks:
        return found
    try:
        with torch.no_grad():
            model(rows(tree_unflatten(leaves, tree)[0], slice(0, NAMED)))
    except Exception:  # whatever is wrong with it is said where it is used
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return found


CONTENTS: dict[str, float | None] = {
    "zeros": 0.0, "other numbers": None, "1e30": 1e30, "1e-42": 1e-42,
    "NaN": float("nan"), "infinity": float("inf"),
}  # fmt: skip
"""What a row may hold that the other rows' bits must not depend on."""


def with_row(tree: Any, row: int, content: float | None, other: Any) -> Any:
    """The same rows but for one: every real number of it this content, or all of it that row of `other`."""

    def changed(leaf: Any, instead: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.clone()
        real = leaf.is_floating_point() or leaf.is_complex()
        leaf[row] = instead[row] if content is None else content if real else 0
        return leaf

    return tree_map(changed, tree, other)


DRAWN, SHIFT = 1 << 20, 1 << 10
"""Numbers of a parameter that are drawn; larger ones repeat so many, each parameter from another place on."""


class _Shared:
    """Weights of large parameters, in one piece of memory: a GPU may have no room for all of them twice."""

    def __init__(self, numbers: Tensor, most: int) -> None:
        self.numbers, self.most, self.given = numbers, most, 0

    def next(self, shape: torch.Size) -> Tensor:
        """Of this shape, beginning elsewhere than the ones before."""
        if self.given == 0:
            times = -(-(self.most + DRAWN) // len(self.numbers))
            self.numbers = self.numbers.repeat(times)
        begin = self.given * SHIFT % DRAWN
        self.given += 1
        return self.numbers[begin : begin + shape.numel()].view(shape)


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Whatever a model does to its buffers inside, they are put back."""
    named = ((part._buffers, name) for part in model.modules() for name in part._buffers)
    before = [(where, name, b, b.clone()) for where, name in named if (b := where[name]) is not None]
    try:
        yield
    finally:
        for where, name, b, numbers in before:
            b.data.copy_(numbers)
            where[name] = b


@contextmanager
def own_weights(model: nn.Module, drawn: torch.Generator) -> Iterator[None]:
    """Ordinary weights for a while, whatever the model's are; buffers are put back as well."""
    before = [(p, p.data) for p in model.parameters()]
    most = max((data.numel() for _, data in before), default=0)
    shared: dict[tuple[int, torch.dtype, torch.device], _Shared] = {}
    for p, data in before:
        wide = data[0].numel() if data.dim() > 1 else 4
        if data.numel() <= DRAWN:
            own = (torch.randn(data.shape, generator=drawn) / wide**0.5).to(data)
        else:
            key = wide, data.dtype, data.device
            if key not in shared:
                shared[key] = _Shared(torch.randn(DRAWN + 7, generator=drawn).to(data) / wide**0.5, most)
            own = shared[key].next(data.shape)
        p.data = own + 0.5 if data.dim() < 2 else own
    try:
        with same_buffers(model):
            yield
    finally:
        for p, data in before:
            p.data = data
