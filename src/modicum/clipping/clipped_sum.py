"""The one function that training calls: book-keeping where it is known to be right, the fall-back elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from modicum.clipping import flat
from modicum.clipping.bookkeeping import Books, CannotKeepBooksError, requiring_grad
from modicum.clipping.bounds import Clip
from modicum.clipping.fallback import fallback_clipped_sum
from modicum.clipping.flat import FlatSums, Problem, Way
from modicum.clipping.probe import Probed, probe
from modicum.clipping.problem import (
    ClippedSum,
    Loss,
    batch_size,
    check_weights,
    enough_rows,
    modes,
    nothing,
    trained_parameters,
    with_zero_rows,
)


class SlowClippingWarning(UserWarning):
    """A model takes the slow way; said once for each model, with the reason."""


# What the first batch showed about a model: whether book-keeping is right for it. A cache, not state: the answer
# can be found again at any time, and both ways give the same sums.
_VERDICTS: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()

# The graphs of a model whose batches repeat in shape; a cache as well.
_FLAT: WeakKeyDictionary[nn.Module, FlatSums] = WeakKeyDictionary()


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    clip: Clip,
    *,
    weights: Tensor | None = None,
    parameters: Iterable[str] | None = None,
    way: Way = Way.AUTO,
) -> ClippedSum:
    """Σ_i w_i·clip(∇ loss_i) over the batch, and the per-example norms before clipping.

    `x` and `y` are tensors, or tuples or dicts of tensors, whose first dimension is the batch; `loss(outputs, y)`
    gives one value per example. `weights` are a 0/1 mask or weights of at most 1; `parameters` names those that
    are trained (default: all that require a gradient). An empty batch gives zeros. Call under `torch.autocast` for
    mixed precision: norms and sums stay in float32. `way` touches speed alone: on a GPU, work that repeats itself
    is replayed as one CUDA graph or compiled, for which model and loss must be functions of their inputs.
    """
    trained = trained_parameters(model, parameters)
    examples = batch_size(x)
    check_weights(weights, examples)
    if examples == 0 or not trained:
        return nothing(trained, examples)
    more = enough_rows(examples) - examples
    if more:  # a row's bits may depend on how many rows there are, where these are few
        ones = next(iter(trained.values())).new_ones(examples) if weights is None else weights
        x, y, weights = (with_zero_rows(tree, more) for tree in (x, y, ones))
        found = clipped_sum(model, loss, x, y, clip, weights=weights, parameters=list(trained), way=way)
        return ClippedSum(found.total, found.norms[:examples])
    verdicts = _VERDICTS.setdefault(model, {})
    key = (tuple(trained), modes(model), tuple(map(id, model.modules())))
    if verdicts.get(key, False) and flat.applies(way, _device_type(trained)):
        found = _FLAT.setdefault(model, FlatSums()).run(
            Problem(model, trained, loss, x, y, clip, weights, examples), way
        )
        if found is not None:
            return found
    if verdicts.get(key, True):
        try:
            probed = _keep_books(model, loss, x, y, trained, examples, proven=key in verdicts)
        except CannotKeepBooksError as reason:
            verdicts[key] = False
            warnings.warn(
                f"per-example clipping of {type(model).__name__} takes the slow way because of {reason}",
                SlowClippingWarning,
                stacklevel=2,
            )
        else:
            if probed.proven:
                verdicts[key] = True
            if probed.usable:
                with torch.no_grad(), torch.autocast(_device_type(trained), enabled=False):
                    return probed.books.settle(clip, weights)
    return fallback_clipped_sum(model, loss, x, y, clip, weights, trained, examples)


def _keep_books(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    trained: dict[str, nn.Parameter],
    examples: int,
    *,
    proven: bool,
) -> Probed:
    if not proven:
        return probe(model, trained, loss, x, y, examples)
    books = Books(model, trained, examples)
    with requiring_grad(model, {}):
        books.backward(books.forward(loss, x, y))
    return Probed(books, usable=True, proven=True)


def _device_type(trained: dict[str, nn.Parameter]) -> str:
    return next(iter(trained.values())).device.type
