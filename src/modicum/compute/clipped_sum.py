"""What training calls: book-keeping where it is known to be right, the fall-back elsewhere."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute import flat
from modicum.compute.bookkeeping import CannotKeepBooksError, PassRecorder, requiring_grad
from modicum.compute.even_products import even_products, multiplies
from modicum.compute.fallback import fallback_clipped_sum, one_at_a_time
from modicum.compute.flat import FlatSums, Problem, Way
from modicum.compute.probe import Verdict, probe
from modicum.compute.problem import (
    ClippedSum,
    Loss,
    Parts,
    batch_size,
    check_weights,
    enough_rows,
    few_threads,
    most_threads,
    nothing,
    trained_parameters,
    without_autocast,
    without_drawing,
)
from modicum.compute.row_steps import Operations, alike, row_step
from modicum.compute.searched import unsearched
from modicum.core.clips import Clip

REMEMBERED = 64
"""Verdicts that are kept: a loss that is made anew for each call would otherwise fill the memory."""


class SlowClippingWarning(UserWarning):
    """A model takes the slow way; said once for each clipper, with the reason."""


class Clipper:
    """The clipped sums of one model, of which the first batches are probed.

    A sum's bits are a function of its inputs: the probe only judges, and one route computes, on the first batch as
    on later ones. Book-keeping, unless the model was found out; then the fall-back.
    """

    def __init__(self, model: nn.Module, way: Way = Way.AUTO) -> None:
        self.model, self.way = model, way
        self.flat, self.operations = FlatSums(), Operations(model)
        self._right: OrderedDict[Hashable | None, bool] = OrderedDict()

    def __call__(
        self,
        loss: Loss,
        x: Any,
        y: Any,
        clip: Clip,
        *,
        weights: Tensor | None = None,
        parameters: Iterable[str] | None = None,
    ) -> ClippedSum:
        """See `clipped_sum`."""
        parts = Parts(self.model)
        trained = parts.trained if parameters is None else trained_parameters(self.model, parameters)
        examples = batch_size(x)
        check_weights(weights, examples)
        if examples == 0 or not trained:
            return nothing(trained, examples)
        problem = Problem(self.model, trained, loss, x, y, clip, weights, examples, parts)
        seen = self.operations(trained, loss, lambda: (x, y), parts)
        with _threads(problem, seen):
            if problem.device.type == "cpu" and unsearched(seen):
                self._tell(f"the operation {unsearched(seen)}, whose rows may depend on one another")
                return one_at_a_time(problem)
            # A row's bits may depend on how many rows there are, where these are few.
            rows = enough_rows(examples, row_step(seen))
            problem = problem.filled(rows)
            found = self._by_books(problem, seen) if self._trusts_books(problem) else None
            if found is None:
                found = fallback_clipped_sum(problem.filled(enough_rows(rows)))
        return ClippedSum(found.total, found.norms[:examples])

    def _trusts_books(self, problem: Problem) -> bool:
        """Probe the batch, unless an earlier one has settled the matter."""
        key = _key(problem)
        known = self._right.get(key)
        if known is not None:
            return known
        try:
            with without_drawing(problem.device):
                verdict = probe(self.model, problem.trained, problem.loss, problem.x, problem.y)
        except CannotKeepBooksError as reason:
            self._remember(key, right=False)
            self._tell(reason)
            return False
        if verdict is Verdict.PROVEN:
            self._remember(key, right=True)
        return verdict is not Verdict.NOT_FINITE

    def _remember(self, key: Hashable | None, *, right: bool) -> None:
        """Forgetting costs another probe and changes no number."""
        if key is not None:
            self._right[key] = right
        if len(self._right) > REMEMBERED:
            self._right.popitem(last=False)

    def _tell(self, reason: CannotKeepBooksError | str) -> None:
        kind = type(self.model).__name__
        message = f"per-example clipping of {kind} takes the slow way because of {reason}"
        warnings.warn(message, SlowClippingWarning, stacklevel=5)

    def _by_books(self, problem: Problem, seen: frozenset[str]) -> ClippedSum | None:
        """None where this batch does what the probed ones did not."""
        try:
            if flat.takes(problem, self.way):
                return self.flat.run(problem, self.way)
            recorder = PassRecorder(problem.model, problem.trained, problem.examples, parts=problem.parts)
            with requiring_grad(problem.parts.parameters, {}), _products(problem, seen):
                recorder.backward(recorder.forward(problem.loss, problem.x, problem.y))
        except CannotKeepBooksError as reason:
            self._tell(reason)
            return None
        with torch.no_grad(), without_autocast(problem.device):
            total, norms, _ = recorder.settle(problem.clip, problem.weights, leave_out=True)
        return ClippedSum(total, norms)


def _threads(problem: Problem, seen: frozenset[str]) -> AbstractContextManager[None]:
    """As many as were searched on a CPU."""
    if problem.device.type != "cpu" or torch.get_num_threads() == 1:
        return nullcontext()
    return few_threads(most_threads(alike=alike(seen)))


def _products(problem: Problem, seen: frozenset[str]) -> AbstractContextManager[None]:
    """Where the model multiplies examples' matrices on a CPU, all of them are computed alike."""
    return even_products() if problem.device.type == "cpu" and multiplies(seen) else nullcontext()


def _key(problem: Problem) -> Hashable | None:
    """What a verdict is about; None where it cannot be remembered."""
    if not isinstance(problem.loss, Hashable):
        return None
    return problem.loss, tuple(problem.trained), problem.parts.key


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

    The model is probed each time: whoever needs many sums keeps a `Clipper`.
    """
    return Clipper(model, way)(loss, x, y, clip, weights=weights, parameters=parameters)
