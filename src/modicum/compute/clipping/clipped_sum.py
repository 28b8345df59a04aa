"""What training calls: the fastest route that is right for a model, settled before a record is looked at."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.clipping import flat
from modicum.compute.clipping.bookkeeping import (
    BookKeepingUnsupportedError,
    PassRecorder,
    requiring_grad,
    shared_inputs,
)
from modicum.compute.clipping.fallback import fallback_clipped_sum, one_at_a_time
from modicum.compute.clipping.flat import FlatSums, Problem, Way
from modicum.compute.clipping.probe import UndecidedError, check_books
from modicum.compute.clipping.problem import (
    ClippedSum,
    Loss,
    Parts,
    batch_size,
    check_weights,
    nothing,
    trained_parameters,
    without_autocast,
    without_drawing,
)
from modicum.compute.clipping.ranges import Range, fails, ranges, safe_lookups, within, without_norms
from modicum.compute.clipping.search import changed_rows
from modicum.compute.clipping.switches import name_undetermined
from modicum.compute.clipping.synthetic import own_weights, same_buffers, synthetic_rows
from modicum.compute.clipping.tracing import LooksAtValuesError, as_traced, looking_modules, refuse_looking
from modicum.core.clips import Clip
from modicum.errors import UntrainedWarning, UserError, listed

REMEMBERED = 64
"""Routes that are kept: a loss that is made anew for each call would otherwise fill the memory."""

PROBED, FEWEST_PROBED, TRIES = 16, 4, 3
"""Rows that a probe looks at, and how often it draws them where they do not tell."""

PROBE_ROWS, OTHER_ROWS = 2, 3
"""Rows by which ranges of whole numbers are found out, and what happens outside of them; and another number, by
which it shows what is everybody's."""

SEARCHED = 2
"""Numbers of rows for which a model is searched: a silo's batches have one, or two where they are shuffled.
Others, of simulations that sample, take the route that was found so far."""


REENTRANT = (
    "activation checkpointing with use_reentrant=True hides what it computes again: turn it off, as by "
    "gradient_checkpointing_disable(), or ask for use_reentrant=False, which is slow here"
)


class SlowClippingWarning(UserWarning):
    """A model takes the slow way; said once for each clipper, with the reason."""


class Route(IntEnum):
    """How sums are computed, fastest first."""

    BOOKS = 0  # book-keeping
    EXAMPLES = 1  # a gradient for each example, all at once
    ALONE = 2  # one example at a time


@dataclass(frozen=True)
class _Facts:
    """What is found out about records of a kind."""

    ranges: tuple[Range, ...]
    shared: tuple[frozenset[int], ...]  # see `shared_inputs`


class Clipper:
    """The clipped sums of one model.

    Its route is settled by shapes, and by synthetic rows and weights, before the first record: no decision
    reads one, and a sum's bits are a function of its inputs.
    """

    def __init__(self, model: nn.Module, way: Way = Way.AUTO) -> None:
        self.model, self.way = model, way
        self.flat = FlatSums()
        self.routes: OrderedDict[Hashable, dict[int, Route]] = OrderedDict()
        self.facts: OrderedDict[Hashable, _Facts] = OrderedDict()
        self._looking = looking_modules(model)

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
        key = _key(problem)
        with safe_lookups(parts.modules):
            facts = self._facts(problem, key)
            if facts.shared:
                problem = replace(problem, shared=facts.shared)
            route = self.route(problem, key)
            problem, stay = within(problem, facts.ranges)
            return without_norms(self._run(route, problem), stay)

    def route(self, problem: Problem, key: Hashable | None) -> Route:
        """Found out for the first few numbers of rows of each loss, mode and kind of record (`key`)."""
        known = self.routes.get(key, {}) if key is not None else {}
        if problem.examples in known:
            return known[problem.examples]
        if len(known) >= SEARCHED:
            return max(known.values())
        with without_drawing(problem.device), as_traced(self._looking):
            found, reason = self._settle(problem, self._facts(problem, key).ranges)
        if reason:
            kind = type(self.model).__name__
            message = f"per-example clipping of {kind} takes the slow way because of {reason}"
            warnings.warn(message, SlowClippingWarning, stacklevel=4)
        if key is not None:
            self.routes[key] = {**known, problem.examples: found}
        if len(self.routes) > REMEMBERED:  # forgetting costs another look and changes no number
            self.routes.popitem(last=False)
        return found

    def _facts(self, problem: Problem, key: Hashable | None) -> _Facts:
        """Found out once for each loss, mode and kind of record."""
        found = self.facts.get(key) if key is not None else None
        if found is not None:
            return found
        with (
            without_drawing(problem.device),
            as_traced(self._looking),
            own_weights(self.model, torch.Generator().manual_seed(0)),
        ):
            rows, other = (self._blank(problem, number) for number in (PROBE_ROWS, OTHER_ROWS))
            batches = ((rows.x, rows.y), (other.x, other.y))
            shared = shared_inputs(self.model, problem.trained, problem.loss, batches)
            found = _Facts(ranges(self.model, problem.loss, rows.x, rows.y), shared)
        if key is not None:
            self.facts[key] = found
        if len(self.facts) > REMEMBERED:
            self.facts.popitem(last=False)
        return found

    def _settle(self, problem: Problem, known: tuple[Range, ...]) -> tuple[Route, str]:
        """The route, and why it is not the fastest."""
        with own_weights(self.model, torch.Generator().manual_seed(0)):
            rows = self._blank(problem, self._probed(problem))
            try:
                unreached = refuse_looking(self.model, problem.trained, problem.loss, rows.x, rows.y)
            except LooksAtValuesError as looks:
                return self._alone(problem, str(looks))
            except (IndexError, NotImplementedError) as failed:  # as of branches that torch takes for us
                return self._alone(problem, _in_a_line(failed))
            except RuntimeError as failed:
                name_undetermined(failed)
                if "use_reentrant" in str(failed):
                    raise UserError(REENTRANT) from failed
                raise
            name_untrained(self.model, unreached)
            odd = fails(self._blank(problem, PROBE_ROWS), known)
            if odd:
                _refuse_on_gpu(problem, odd)
                return self._alone(problem, odd)
            reason = self._against_books(problem)
            if not reason:
                found = self._against(Route.BOOKS, problem)
                return self._alone(problem, found) if found else (Route.BOOKS, "")
            found = self._against(Route.EXAMPLES, problem)
            return self._alone(problem, f"{reason}; {found}") if found else (Route.EXAMPLES, reason)

    def _alone(self, problem: Problem, reason: str) -> tuple[Route, str]:
        """The last route, if a model keeps nothing of one example until the next."""
        found = self._against(Route.ALONE, self._blank(problem, min(problem.examples, FEWEST_PROBED)))
        if found:
            raise UserError(f"{type(self.model).__name__} cannot be clipped record by record, because of {found}")
        return Route.ALONE, reason

    def _against_books(self, problem: Problem) -> str:
        """What a probe has to say against book-keeping."""
        found = ""
        for seed in range(TRIES):
            rows = self._blank(problem, self._probed(problem), seed)
            try:
                check_books(self.model, problem.trained, problem.loss, rows.x, rows.y, problem.shared)
            except UndecidedError as reason:
                found = str(reason)
            except BookKeepingUnsupportedError as reason:
                return str(reason)
            except RuntimeError as failed:  # it ran without books a moment ago
                return _in_a_line(failed)
            else:
                return ""
        return found

    def _probed(self, problem: Problem) -> int:
        """Rows of a probe. A GPU may not have the memory for more than a batch has."""
        return PROBED if problem.device.type == "cpu" else min(PROBED, max(FEWEST_PROBED, problem.examples))

    def _against(self, route: Route, problem: Problem) -> str:
        """What a search of rows has to say against a route; or that it cannot be gone."""
        rows, other = (self._blank(problem, problem.examples, seed) for seed in (0, 1))
        try:
            with same_buffers(self.model):
                return changed_rows(partial(self._run, route), rows, other)
        except UserError:
            raise
        except Exception as failed:
            name_undetermined(failed)
            return _in_a_line(failed)

    def _blank(self, problem: Problem, number: int, seed: int = 0) -> Problem:
        """The same with synthetic rows."""
        drawn = torch.Generator().manual_seed(seed)
        x, y = synthetic_rows(self.model, problem.x, problem.y, number, drawn)
        return replace(problem, x=x, y=y, weights=None, examples=number)

    def _run(self, route: Route, problem: Problem) -> ClippedSum:
        with as_traced(self._looking):
            if route is Route.BOOKS:
                return self._by_books(problem)
            return fallback_clipped_sum(problem) if route is Route.EXAMPLES else one_at_a_time(problem)

    def _by_books(self, problem: Problem) -> ClippedSum:
        if flat.takes(problem, self.way):
            return self.flat.run(problem, self.way, lambda: self._blank(problem, problem.examples))
        recorder = PassRecorder(
            problem.model, problem.trained, problem.examples, parts=problem.parts, shared=problem.shared
        )
        with requiring_grad(problem.parts.parameters, {}):
            recorder.backward(recorder.forward(problem.loss, problem.x, problem.y))
        with torch.no_grad(), without_autocast(problem.device):
            return ClippedSum(*recorder.settle(problem.clip, problem.weights))


def _refuse_on_gpu(problem: Problem, odd: str) -> None:
    """A GPU's context does not survive such a record."""
    if problem.device.type == "cuda":
        raise UserError(f"this model cannot be trained on a GPU because of {odd}: clamp them in its forward pass")


def name_untrained(model: nn.Module, unreached: list[str]) -> None:
    """One line, before the first record, for parameters that no loss reaches."""
    if unreached:
        message = (
            f"the loss of {type(model).__name__} does not reach {listed(unreached)}: noise would be all that they "
            "are given; freeze them with requires_grad_(False)"
        )
        warnings.warn(message, UntrainedWarning, stacklevel=6)


def _in_a_line(failed: Exception) -> str:
    return f"{type(failed).__name__}: {' '.join(str(failed).split())[:160]}"


def _key(problem: Problem) -> Hashable | None:
    """What a route is about; None where it cannot be remembered."""
    if not isinstance(problem.loss, Hashable):
        return None
    leaves, tree = problem.batch
    kinds = tuple((t.shape[1:], t.dtype) if isinstance(t, Tensor) else None for t in leaves)
    shown = "" if tree is flat.PAIR else str(tree)
    return problem.loss, tuple(problem.trained), problem.parts.key, kinds, shown, problem.device


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

    The route is settled each time: whoever needs many sums keeps a `Clipper`.
    """
    return Clipper(model, way)(loss, x, y, clip, weights=weights, parameters=parameters)
