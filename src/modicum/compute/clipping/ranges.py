"""Whole numbers that a model has no row for: a record that holds one counts as zero, for itself alone.

Looking one up would raise an error, or end a GPU's context, and one record would decide over everybody's step. So
embeddings give NaN for it, which a clipped sum knows what to do with; labels are held against the classes that a
loss takes; and a model that may fail on other whole numbers is run one example at a time. All of this is found out
before a record is looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from modicum.compute.clipping.flat import PAIR, Problem
from modicum.compute.clipping.problem import ClippedSum, Loss

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)

IGNORED = -100
"""What losses of torch leave out, where they are not told another."""


@dataclass(frozen=True)
class Range:
    """Values of one leaf of inputs and targets that a loss has: 0 … size − 1, and `others`."""

    leaf: int
    size: int
    others: tuple[int, ...] = ()

    def outside(self, numbers: Tensor) -> Tensor:
        """(B, …), whether a number is none of them."""
        out = numbers != numbers.clamp(0, self.size - 1)
        for other in self.others:
            out.logical_and_(numbers != other)
        return out


@contextmanager
def safe_lookups(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Embeddings give NaN inside for a number that they have no row for, without asking whether there is one."""
    handles = []
    for layer in modules:
        if isinstance(layer, LOOKUPS) and _looks_up(layer):
            lookup = _Lookup(layer.num_embeddings, isinstance(layer, nn.EmbeddingBag))
            handles.append(layer.register_forward_pre_hook(lookup.before))
            handles.append(layer.register_forward_hook(lookup.after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _looks_up(layer: nn.Module) -> bool:
    """Whether an embedding looks up the numbers that it is called with. One with its own forward pass may look
    up their places."""
    forward, weight = type(layer).forward, layer._parameters.get("weight")
    if forward in (nn.Embedding.forward, nn.EmbeddingBag.forward) or weight is None:
        return True
    told = torch.arange(len(weight), device=weight.device).to(weight)[:, None].expand_as(weight)
    layer._parameters["weight"] = nn.Parameter(told, requires_grad=False)  # whatever the model's own are
    try:
        with torch.no_grad():
            found = [forward(layer, told.new_full((1, 2), n, dtype=torch.long)) for n in (0, 1)]
    except Exception:  # what stays unsafe is found out by `fails`
        return False
    finally:
        layer._parameters["weight"] = weight
    return not torch.equal(*found)


class _Lookup:
    """One call of one embedding."""

    def __init__(self, size: int, is_bag: bool) -> None:
        self.size, self.is_bag = size, is_bag
        self.out: Tensor | None = None

    def before(self, _layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or (self.is_bag and args[0].dim() != 2):  # what stays unsafe is found out by `fails`
            return None
        out = args[0] != args[0].clamp(0, self.size - 1)
        self.out = out.any(1) if self.is_bag else out
        return args[0].masked_fill(out, 0), *args[1:]

    def after(self, _layer: nn.Module, _args: tuple[Any, ...], found: Tensor) -> Tensor:
        out, self.out = self.out, None
        return found if out is None else found.masked_fill(out[..., None], torch.nan)


def ranges(model: nn.Module, loss: Loss, x: Any, y: Any) -> tuple[Range, ...]:
    """What the loss takes, by synthetic rows."""
    leaves, tree = tree_flatten((x, y))
    try:
        with torch.no_grad():
            outputs = _on_cpu(model(x))  # a GPU would not survive what is tried here
    except Exception:  # a model that fails on these rows is run one example at a time, and may fail there
        return ()
    found: list[Range] = []
    for i in range(len(tree_flatten(x)[0]), len(leaves)):
        if isinstance(leaves[i], Tensor) and leaves[i].dtype == torch.int64:
            found += _taken(loss, outputs, [_on_cpu(leaf) for leaf in leaves], tree, i)
    return tuple(found)


def fails(problem: Problem, known: tuple[Range, ...]) -> str:
    """What a model and its loss have against odd whole numbers, tried on synthetic rows.

    Called where lookups are safe, and tried on a processor: a GPU's context would not survive."""
    try:
        model = problem.model if problem.device.type == "cpu" else _copy_on_cpu(problem.model)
        ordinary = replace(problem, x=_on_cpu(problem.x), y=_on_cpu(problem.y))
        with torch.no_grad():
            outputs = model(ordinary.x)
            problem.loss(outputs, ordinary.y)
    except Exception:  # it cannot be tried here
        return ""
    try:
        with torch.no_grad():
            problem.loss(outputs, within(replace(ordinary, y=_odd(ordinary.y)), known)[0].y)
            problem.loss(model(_odd(ordinary.x)), ordinary.y)
    except Exception as failed:
        return f"whole numbers on which it fails ({' '.join(str(failed).split())[:120]})"
    return ""


def _odd(tree: Any) -> Any:
    """The same rows, the first two with the least and the largest whole number there is."""

    def odd(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in WHOLE:
            return leaf
        leaf, limits = leaf.clone(), torch.iinfo(leaf.dtype)
        leaf[:1], leaf[1:2] = limits.min, limits.max
        return leaf

    return tree_map(odd, tree)


def _taken(loss: Loss, outputs: Any, leaves: list[Any], tree: Any, i: int) -> list[Range]:
    """The range of a target of which the loss takes every class of an output, and not one more."""

    def takes(value: int) -> bool:
        tried = [*leaves[:i], torch.full_like(leaves[i], value), *leaves[i + 1 :]]
        try:
            with torch.no_grad():
                loss(outputs, tree_unflatten(tried, tree)[1])
        except (IndexError, RuntimeError):
            return False
        return True

    for size in _widths(tree_flatten(outputs)[0]):
        if takes(size - 1) and not takes(size):
            return [Range(i, size, (IGNORED,) if takes(IGNORED) else ())]
    return []


def _widths(outputs: Iterable[Any]) -> list[int]:
    """Sizes that may be numbers of classes, the last first."""
    sizes = (n for t in outputs if isinstance(t, Tensor) for n in reversed(t.shape[1:]))
    return list(dict.fromkeys(sizes))


def _copy_on_cpu(model: nn.Module) -> nn.Module:
    """Without a second copy on its own device, which may have no room for one."""
    there: dict[int, Any] = {id(p): nn.Parameter(p.detach().cpu(), p.requires_grad) for p in model.parameters()}
    there |= {id(b): b.detach().cpu() for b in model.buffers()}
    return copy.deepcopy(model, there).cpu()


def _on_cpu(tree: Any) -> Any:
    leaves, shape = tree_flatten(tree)
    return tree_unflatten([t.detach().cpu() if isinstance(t, Tensor) else t for t in leaves], shape)


def within(problem: Problem, known: tuple[Range, ...]) -> tuple[Problem, Tensor | None]:
    """The same with zeros in place of what is out of range, those records at weight 0; and which stay.

    Always, without asking whether there is one."""
    if not known:
        return problem, None
    leaves, tree = problem.batch
    leaves, out = list(leaves), None
    for one in known:
        outside = one.outside(leaves[one.leaf])
        leaves[one.leaf] = leaves[one.leaf].masked_fill(outside, 0)
        rows = outside if outside.dim() == 1 else outside.flatten(1).any(1)
        out = rows if out is None else out | rows
    assert out is not None
    stay = ~out
    x, y = leaves if tree is PAIR else tree_unflatten(leaves, tree)
    weights = stay.float() if problem.weights is None else problem.weights * stay
    return replace(problem, x=x, y=y, weights=weights), stay


def without_norms(found: ClippedSum, stay: Tensor | None) -> ClippedSum:
    """Records that were out of range have norm 0."""
    return found if stay is None else ClippedSum(found.total, found.norms * stay)
