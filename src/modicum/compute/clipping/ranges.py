"""Whole numbers that a model has no row for: a record that holds one counts as zero, for itself alone.

Looking one up would raise an error, or end a GPU's context, and one record would decide over everybody's step.
What is in range is found out before a record is looked at: an embedding's size, and the classes of a loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from modicum.compute.clipping.flat import Problem
from modicum.compute.clipping.problem import ClippedSum, Loss
from modicum.compute.clipping.synthetic import looked_up

IGNORED = -100
"""What losses of torch leave out, where they are not told another."""


@dataclass(frozen=True)
class Range:
    """Values of one leaf of inputs and targets that a model and its loss have: 0 … size − 1, and `others`."""

    leaf: int
    size: int
    others: tuple[int, ...] = ()

    def outside(self, numbers: Tensor) -> Tensor:
        """(B, …), whether a number is none of them."""
        out = numbers != numbers.clamp(0, self.size - 1)
        for other in self.others:
            out.logical_and_(numbers != other)
        return out


def ranges(model: nn.Module, loss: Loss, x: Any, y: Any) -> tuple[Range, ...]:
    """What the model looks up and the loss takes, by synthetic rows."""
    leaves, tree = tree_flatten((x, y))
    found = [Range(i, size) for i, size in looked_up(model, leaves, tree).items()]
    try:
        with torch.no_grad():
            outputs = _on_cpu(model(x))  # a GPU would not survive what is tried here
    except Exception:  # a model that fails on these rows is run one example at a time, and may fail there
        return tuple(found)
    inputs = len(tree_flatten(x)[0])
    for i in range(inputs, len(leaves)):
        if isinstance(leaves[i], Tensor) and leaves[i].dtype == torch.int64:
            found += _taken(loss, outputs, [_on_cpu(leaf) for leaf in leaves], tree, i)
    return tuple(found)


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
    x, y = tree_unflatten(leaves, tree)
    weights = stay.float() if problem.weights is None else problem.weights * stay
    return replace(problem, x=x, y=y, weights=weights), stay


def without_norms(found: ClippedSum, stay: Tensor | None) -> ClippedSum:
    """Records that were out of range have norm 0."""
    return found if stay is None else ClippedSum(found.total, found.norms * stay)
