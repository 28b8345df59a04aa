"""A stack's step as a function of tensors of fixed shape, so that a GPU can replay it as one CUDA graph.

Batches are filled up to a size that few steps exceed, each client with a record of its own; rows that were filled
up get weight 0. Everything that differs between steps of equal shape is a tensor: parameters, records, which rows
are real, and bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from modicum.compute.client_batched.model import ClientBatchedModel, StackedPass
from modicum.compute.clipping.capture import Graphs, rounded_up
from modicum.compute.clipping.problem import check_losses, example_factors
from modicum.core.clips import Clip
from modicum.core.parts import Batch, Losses
from modicum.core.stack import PooledBatches

Sums = Callable[[Tensor, StackedPass, Mapping[str, Tensor] | None], Tensor]


def use_graphs(theta: Tensor) -> bool:
    """Whether passes of one shape are captured and replayed: on a GPU alone."""
    return theta.is_cuda


def fits(batches: Sequence[Batch], theta: Tensor) -> TypeGuard[PooledBatches]:
    """Whether the batches can be gathered on the device with one index, and no client is without records."""
    if not (use_graphs(theta) and isinstance(batches, PooledBatches) and batches.pool.worth_joining):
        return False
    if not isinstance(batches.pool.records[0].x, Tensor):
        return False
    return any(batches.sizes) and all(len(r) for r in batches.pool.records[: len(batches)])


def rounded(sizes: Sequence[int]) -> int:
    """The size that batches are filled up to: their own if it is one, else the next of few."""
    return max(sizes) if min(sizes) == max(sizes) else rounded_up(max(sizes))


@dataclass(frozen=True)
class Stack:
    """The rows of a step, on the device: inputs and targets of every row, and which rows are records."""

    x: Tensor
    targets: dict[str, Tensor]
    real: Tensor  # (clients, size), 1 or 0

    @classmethod
    def of(cls, batches: PooledBatches, like: Tensor) -> Stack:
        """Of all clients, each filled up with rows of its own; weights in the precision of `like`."""
        joined, sizes = batches.pool.joined, batches.sizes
        size = rounded(sizes)
        device = joined.x.device
        index = batches.rows(size).to(device, non_blocking=True)
        counts = torch.tensor(sizes).to(device, non_blocking=True)
        real = (torch.arange(size, device=device) < counts[:, None]).to(like.dtype)
        targets = {name: t.index_select(0, index) for name, t in joined.targets.items()}
        return cls(joined.x.index_select(0, index), targets, real)


class FixedShapeSteps:
    """Gradients and clipped sums of stacks, replayed where a shape repeats."""

    def __init__(
        self, batched: ClientBatchedModel, named: Callable[[Tensor], dict[str, Tensor]], sums: Sums
    ) -> None:
        self._batched, self._named, self._sums = batched, named, sums
        self.graphs = Graphs()

    def gradients(self, theta: Tensor, stack: Stack, losses: Losses) -> tuple[Tensor, Tensor]:
        """Gradients of the mean losses, and which clients' are finite."""

        def work(theta: Tensor, x: Tensor, shares: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
            run = self._pass(theta, x, shares, dict(zip(stack.targets, targets, strict=True)), losses, False)
            with torch.no_grad():
                total = self._sums(theta, run, None)
                return total, torch.isfinite(total).all(1)

        shares = stack.real / stack.real.sum(1, keepdim=True).clamp(min=1)
        total, fine = self._run("gradients", losses, work, theta, stack, shares)
        return total, fine

    def clipped_sums(
        self, theta: Tensor, stack: Stack, losses: Losses, clip: Clip, bounds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sums of gradients clipped by such a rule with each client's bounds; and (clients, size) norms."""

        def work(theta: Tensor, x: Tensor, real: Tensor, bounds: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
            run = self._pass(theta, x, real, dict(zip(stack.targets, targets, strict=True)), losses, True)
            with torch.no_grad():
                by_name, norms, finite = factors(run, clip, bounds, real)
                run.leave_out(finite.flatten())
                return self._sums(theta, run, by_name), norms

        total, norms = self._run(clip.kind, losses, work, theta, stack, stack.real, bounds)
        return total, norms

    def _run(
        self,
        kind: Hashable,
        losses: Losses,
        work: Callable[..., tuple[Tensor, ...]],
        theta: Tensor,
        stack: Stack,
        *more: Tensor,
    ) -> tuple[Tensor, ...]:
        key = (kind, losses, tuple(stack.targets), *self._batched.state())
        return self.graphs.run(key, work, (theta, stack.x, *more, *stack.targets.values()))

    def _pass(
        self,
        theta: Tensor,
        x: Tensor,
        seeds: Tensor,
        targets: dict[str, Tensor],
        losses: Losses,
        measure: bool,
    ) -> StackedPass:
        run = StackedPass(self._named(theta.detach()), *seeds.shape, measure=measure)
        outputs = self._batched.outputs(x, run)
        with torch.enable_grad():
            values = run.with_gradient(check_losses(losses(outputs, targets), run.rows))
        torch.autograd.grad(values, run.anchor, seeds.reshape(-1).to(values.dtype), allow_unused=True)
        return run


def factors(
    run: StackedPass, clip: Clip, bounds: Tensor, real: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(clients, size) factors by parameter, norms, and which rows are finite; (clients, numbers) bounds."""
    shape, names = (run.clients, run.size), list(run.squares)
    if not names:  # the loss reaches no parameter
        return {}, real.new_zeros(shape, dtype=bounds.dtype), real.new_ones(shape, dtype=torch.bool)
    squares = torch.stack(list(run.squares.values()), dim=1).view(*shape, len(names))
    own = clip.with_values(bounds[:, None, None].unbind(-1))
    found, norms, finite = example_factors(own, names, squares, real, bounds.dtype)
    return dict(zip(names, found.unbind(-1), strict=True)), norms, finite
