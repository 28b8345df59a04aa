"""The stacked engine: rows of all clients in one batch, per-example norms and sums by book-keeping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.compute.client_batched import fixed_shape
from modicum.compute.client_batched.client_sums import subtract_client_sums, write_client_sums
from modicum.compute.client_batched.model import ClientBatchedModel, StackedPass
from modicum.compute.clipping.loop import LoopBackend
from modicum.compute.clipping.problem import check_losses, sum_dtype
from modicum.compute.clipping.sums import sum_type
from modicum.core.clips import Clip
from modicum.core.parts import Batch, Losses
from modicum.core.records import first_leaf
from modicum.core.stack import Gathered, SideBySide, padded, real_rows


@dataclass(frozen=True)
class _Stack:
    """The batches of all clients, filled up to one size."""

    x: Tensor
    targets: dict[str, Tensor]
    sizes: list[int]
    size: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> _Stack:
        sizes = batches.sizes if isinstance(batches, Gathered) else [len(b) for b in batches]
        size = max(sizes, default=0)
        if isinstance(batches, Gathered):
            return cls(*batches.padded(size), sizes, size)
        return cls(*padded(list(batches), size), sizes, size)

    @property
    def full(self) -> bool:
        return min(self.sizes) == self.size

    def whole(self) -> _Stack:
        """The same with targets of zeros for padding rows: all rows pass through the loss."""
        if self.full:
            return self
        rows = real_rows(self.sizes, self.size).to(first_leaf(self.x).device)
        targets = {
            name: t.new_zeros(len(first_leaf(self.x)), *t.shape[1:]).index_copy_(0, rows, t)
            for name, t in self.targets.items()
        }
        return _Stack(self.x, targets, [self.size] * len(self.sizes), self.size)

    def real(self, outputs: Tensor) -> Tensor:
        """The rows of the outputs that belong to a record."""
        return outputs if self.full else outputs[real_rows(self.sizes, self.size).to(outputs.device)]

    def shares(self, values: Tensor) -> Tensor:
        """What each record counts in its client's mean."""
        if self.full:
            return torch.full_like(values, 1 / self.size)
        shares = torch.tensor([1 / n for n in self.sizes for _ in range(n)], dtype=values.dtype)
        return shares.to(values.device)

    def mask(self, like: Tensor) -> Tensor:
        """(clients, size): which rows belong to a record."""
        sizes = torch.tensor(self.sizes, device=like.device)
        return torch.arange(self.size, device=like.device) < sizes[:, None]


class StackedEngine:
    """Gradients and clipped sums of all clients of a stack at once."""

    def __init__(self, model: nn.Module, loop: LoopBackend) -> None:
        self.loop, self.layout = loop, loop.layout
        self._batched = ClientBatchedModel(model)  # raises CannotStackError
        self._slices = self.layout.slices()
        self._fixed = fixed_shape.FixedShapeSteps(self._batched, self.layout.named, self._sums)

    def _forward(
        self, weights: dict[str, Tensor], stack: _Stack, losses: Losses, *, measure: bool
    ) -> tuple[StackedPass, Tensor]:
        run = StackedPass(weights, len(stack.sizes), stack.size, measure=measure)
        outputs = self._batched.outputs(stack.x, run)
        with torch.enable_grad():
            values = losses(stack.real(outputs), stack.targets)
            return run, run.with_gradient(check_losses(values, sum(stack.sizes)))

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        """As `Backend.gradients`: of all clients in one pass, which a client whose row is not finite does over
        alone."""
        if fixed_shape.fits(batches, theta):
            found, fine = self._fixed.gradients(theta, fixed_shape.Stack.of(batches, theta), losses)
            for i in (~fine).nonzero().flatten().tolist():  # a filled-up row may hold 0 · ∞
                found[i] = self.loop.gradients(theta[i : i + 1], [batches[i]], losses)[0]
            return found
        stack = _Stack.of(batches)
        if not stack.size:
            return torch.zeros_like(theta)
        run, values = self._forward(self.layout.named(theta.detach()), stack, losses, measure=False)
        with torch.no_grad():
            torch.autograd.grad(values, run.anchor, stack.shares(values), allow_unused=True)
            total = self._sums(theta, run, None)
        if not stack.full:  # a filled-up row may hold 0 · ∞
            for i in (~torch.isfinite(total).all(1)).nonzero().flatten().tolist():
                total[i] = self.loop.gradients(theta[i : i + 1], [batches[i]], losses)[0]
        return total

    def descend(self, theta: Tensor, steps: Sequence[SideBySide], losses: Losses, rate: float) -> Tensor:
        """theta − rate · gradients, step after step, each parameter's as soon as it is known.

        Meanwhile each parameter of all clients is one run of memory, which is what batched products are fast on.
        """
        named = self.layout.named(theta.detach())
        weights = {name: part.clone(memory_format=torch.contiguous_format) for name, part in named.items()}
        for batches in steps:
            stack = _Stack.of(batches)
            run, values = self._forward(weights, stack, losses, measure=False)
            with torch.no_grad():
                torch.autograd.grad(values, run.anchor, stack.shares(values), allow_unused=True)
                while run.kept:  # emptied: what is kept holds the graph, and the graph holds the run
                    name, kept = run.kept.popitem()
                    subtract_client_sums(weights[name], kept, rate, run.size)
        return torch.cat([part.flatten(1) for part in weights.values()], dim=1)

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        """As `Backend.clipped_sums`: of all clients in one pass. All clips are of one kind; bounds may differ."""
        dtype = sum_dtype(theta)
        bounds = torch.tensor([clip.values for clip in clips], dtype=dtype, device=theta.device)
        if fixed_shape.fits(batches, theta):
            fixed = fixed_shape.Stack.of(batches, theta)
            total, norms = self._fixed.clipped_sums(theta, fixed, losses, clips[0], bounds)
            return total, [row[: len(batch)] for row, batch in zip(norms, batches.chosen, strict=True)]
        if not any(map(len, batches)):
            return torch.zeros_like(theta), [theta.new_zeros(0) for _ in batches]
        stack = _Stack.of(batches)
        run, values = self._forward(self.layout.named(theta.detach()), stack.whole(), losses, measure=True)
        with torch.no_grad():
            torch.autograd.grad(values, run.anchor, torch.ones_like(values), allow_unused=True)
            factors, norms, finite = fixed_shape.factors(run, clips[0], bounds, stack.mask(theta))
            run.leave_out(finite.flatten())
            total = self._sums(theta, run, factors)
        return total, [row[:n] for row, n in zip(norms, stack.sizes, strict=True)]

    def _sums(self, theta: Tensor, run: StackedPass, factors: Mapping[str, Tensor] | None) -> Tensor:
        dtype = sum_dtype(theta) if factors is None else sum_type(run.size, sum_dtype(theta))
        total = torch.empty_like(theta, dtype=dtype)
        for name, where in self._slices.items():
            kept = run.kept.pop(name, None)
            part = total[:, where]
            if kept is None:
                part.zero_()
            else:
                where_to = part.view(-1, *run.weights[name].shape[1:])
                weights = None if factors is None else factors[name]
                write_client_sums(where_to, kept, weights, run.size)
        return total
