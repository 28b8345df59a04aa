"""The stacked backend: clients of a round, or the configurations of a grid, as one batched computation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.clipping import Auto, Flat
from modicum.clipping.problem import check_losses, sum_dtype
from modicum.core.parts import Batch, ClipRule, Losses
from modicum.core.stack import PooledBatches, padded, real_rows
from modicum.engines.loop import LoopBackend
from modicum.engines.sums import client_sums
from modicum.engines.twin import CannotStackError, Run, Twin

SHRINK = 8  # as in modicum.clipping.bounds: rounding must not lift a clipped norm above its bound
COMPARED = 3  # clients whose first results are compared with the loop's
GRADIENTS, SUMS = "gradients", "clipped sums"


class SlowEngineWarning(UserWarning):
    """A model has to run client by client; said once for each model, with the reason."""


@dataclass(frozen=True)
class _Stack:
    """The batches of all clients, filled up to one size."""

    x: Tensor
    targets: dict[str, Tensor]
    sizes: list[int]
    size: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> _Stack:
        pooled = isinstance(batches, PooledBatches)
        sizes = batches.sizes if isinstance(batches, PooledBatches) else [len(b) for b in batches]
        size = max(sizes, default=0)
        x, targets = batches.padded(size) if pooled else padded(list(batches), size)  # type: ignore[attr-defined]
        return cls(x, targets, sizes, size)

    @property
    def full(self) -> bool:
        return min(self.sizes) == self.size

    def real(self, outputs: Tensor) -> Tensor:
        """The rows of the outputs that belong to a record."""
        return outputs if self.full else outputs[real_rows(self.sizes, self.size).to(outputs.device)]

    def mask(self, like: Tensor) -> Tensor:
        """(clients, size): which rows belong to a record."""
        sizes = torch.tensor(self.sizes, device=like.device)
        return torch.arange(self.size, device=like.device) < sizes[:, None]


class FusedBackend:
    """Computes all clients of the stack together; what cannot be stacked runs client by client.

    The first results of a model are compared with the loop's, so that a model which mixes rows, or uses its
    weights outside their layers, is found out and sent to the loop for good.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loop = LoopBackend(model)
        self.layout = self.loop.layout
        self.model = model
        self._twin = Twin(model)  # raises CannotStackError
        self._slices = self.layout.slices()
        self._proven: dict[tuple[str, bool], bool] = {}

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.loop.outputs(theta, x)

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        if not self._usable(GRADIENTS, batches):
            return self.loop.gradients(theta, batches, losses)
        try:
            found = self._gradients(theta, batches, losses)
        except (CannotStackError, RuntimeError, AttributeError) as reason:
            self._give_up(GRADIENTS, reason)
            return self.loop.gradients(theta, batches, losses)
        if not self._known(GRADIENTS):
            few = slice(0, COMPARED)
            truth = self.loop.gradients(theta[few], batches[few], losses)
            if not self._compare(GRADIENTS, found[few], truth):
                return self.loop.gradients(theta, batches, losses)
        return found

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, bounds: Sequence[float], rule: ClipRule
    ) -> tuple[Tensor, list[Tensor]]:
        if not self._usable(SUMS, batches):
            return self.loop.clipped_sums(theta, batches, losses, bounds, rule)
        try:
            found = self._clipped_sums(theta, batches, losses, bounds, rule)
        except (CannotStackError, RuntimeError, AttributeError) as reason:
            self._give_up(SUMS, reason)
            return self.loop.clipped_sums(theta, batches, losses, bounds, rule)
        if not self._known(SUMS):
            few = slice(0, COMPARED)
            truth, _ = self.loop.clipped_sums(theta[few], batches[few], losses, bounds[few], rule)
            if not self._compare(SUMS, found[0][few], truth):
                return self.loop.clipped_sums(theta, batches, losses, bounds, rule)
        return found

    def _usable(self, kind: str, batches: Sequence[Batch]) -> bool:
        return len(batches) > 1 and self._proven.get((kind, self.model.training), True)

    def _known(self, kind: str) -> bool:
        return (kind, self.model.training) in self._proven

    def _give_up(self, kind: str, reason: Exception) -> None:
        """Errors of a model that worked before are real ones: out of memory, for instance."""
        if self._known(kind):
            raise reason
        self._proven[kind, self.model.training] = False
        warnings.warn(
            f"{type(self.model).__name__} runs client by client because of {' '.join(str(reason).split())}",
            SlowEngineWarning,
            stacklevel=3,
        )

    def _compare(self, kind: str, found: Tensor, truth: Tensor) -> bool:
        """Whether the loop agrees. A batch that tells nothing (all zero, or not finite) leaves it open."""
        telling = torch.isfinite(truth).all(1) & truth.any(1)
        if int(telling.sum()) < 2:
            return False
        found, truth = found[telling], truth[telling]
        error = torch.linalg.vector_norm((found - truth).double(), dim=1)
        size = torch.linalg.vector_norm(truth.double(), dim=1)
        if bool((error > _tolerance(truth) * size).any()):
            self._give_up(kind, CannotStackError("a forward pass in which rows are mixed"))
            return False
        self._proven[kind, self.model.training] = True
        return True

    def _forward(self, theta: Tensor, stack: _Stack, losses: Losses, *, measure: bool) -> tuple[Run, Tensor]:
        run = Run(self.layout.named(theta.detach()), len(theta), stack.size, measure=measure)
        outputs = self._twin.outputs(stack.x, run)
        if outputs.shape[0] != run.rows:
            raise CannotStackError("an output whose first dimension is not the batch")
        with torch.enable_grad():
            values = losses(stack.real(outputs), stack.targets)
        return run, check_losses(values, sum(stack.sizes))

    def _gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        stack = _Stack.of(batches)
        if not stack.size:
            return torch.zeros_like(theta)
        run, values = self._forward(theta, stack, losses, measure=False)
        shares = torch.tensor([1 / n for n in stack.sizes for _ in range(n)], dtype=values.dtype)
        with torch.no_grad():
            _backward(values, run, shares.to(values.device))
            total = self._sums(theta, run, None)
            if not stack.full:  # a filled-up row may hold 0 · ∞
                self._redo(~torch.isfinite(total).all(1), total, theta, batches, losses)
        return total

    def _redo(self, wrong: Tensor, total: Tensor, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> None:
        for i in wrong.nonzero().flatten().tolist():
            total[i] = self.loop.gradients(theta[i : i + 1], [batches[i]], losses)[0]

    def _clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, bounds: Sequence[float], rule: ClipRule
    ) -> tuple[Tensor, list[Tensor]]:
        clips = [Flat(bound) for bound in bounds]  # refuses bounds that are not positive and finite
        stack = _Stack.of(batches)
        if not stack.size:
            return torch.zeros_like(theta), [theta.new_zeros(0) for _ in batches]
        run, values = self._forward(theta, stack, losses, measure=True)
        with torch.no_grad():
            _backward(values, run, torch.ones_like(values))
            squares = self._squares(run, theta)
            norms = squares.sqrt()
            column = torch.tensor([clip.C for clip in clips], dtype=norms.dtype, device=norms.device)[:, None]
            ratio = column / norms if rule is ClipRule.FLAT else column / (norms + Auto.gamma)
            factors = (ratio * (1 - SHRINK * torch.finfo(norms.dtype).eps)).clamp(max=_largest(rule))
            if not stack.full:
                factors = torch.where(stack.mask(norms), factors, 0.0)
            total = self._sums(theta, run, factors)
            wrong = ~torch.isfinite(squares).all(1)
        answer = [row[:n] for row, n in zip(norms, stack.sizes, strict=True)]
        for i in wrong.nonzero().flatten().tolist():  # the loop leaves out examples that are not finite
            one = slice(i, i + 1)
            total[one], (answer[i],) = self.loop.clipped_sums(theta[one], [batches[i]], losses, bounds[one], rule)
        return total, answer

    def _squares(self, run: Run, theta: Tensor) -> Tensor:
        """(clients, size) squared norms over all parameters."""
        found = list(run.squares.values())
        total = torch.stack(found).sum(0) if found else theta.new_zeros(run.rows, dtype=sum_dtype(theta))
        return total.view(run.clients, run.size)

    def _sums(self, theta: Tensor, run: Run, factors: Tensor | None) -> Tensor:
        total = torch.empty_like(theta, dtype=sum_dtype(theta))
        for name, where in self._slices.items():
            kept = run.kept.pop(name, None)
            part = total[:, where]
            if kept is None:
                part.zero_()
            else:
                part.view(-1, *run.weights[name].shape[1:]).copy_(client_sums(kept, factors, run.clients))
        return total


def _backward(values: Tensor, run: Run, seeds: Tensor) -> None:
    if values.requires_grad:
        torch.autograd.grad(values, run.anchor, seeds, allow_unused=True)


def _largest(rule: ClipRule) -> float:
    return 1.0 if rule is ClipRule.FLAT else float("inf")


def _tolerance(truth: Tensor) -> float:
    return 1e-8 if truth.dtype == torch.float64 else 1e-2
