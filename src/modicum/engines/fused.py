"""The stacked backend: clients of a round, or the configurations of a grid, as one batched computation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from modicum.clipping.rounding import full_precision
from modicum.core.parts import Batch, ClipRule, Losses
from modicum.core.stack import SideBySide
from modicum.engines.loop import LoopBackend
from modicum.engines.stacked import StackedEngine
from modicum.engines.twin import CannotStackError
from modicum.engines.vmapped import VmapEngine

COMPARED = 3  # clients whose first results are compared with the loop's
GRADIENTS, SUMS = "gradients", "clipped sums"


class SlowEngineWarning(UserWarning):
    """A model has to run client by client; said once for each model, with the reason."""


class FusedBackend:
    """Computes all clients of the stack together; what cannot be stacked runs client by client.

    The first results of a model are compared with the loop's, so that a model which mixes rows, or uses its
    weights outside their layers, is found out and sent to the loop for good.
    """

    def __init__(self, model: nn.Module) -> None:
        self.loop = LoopBackend(model)
        self.layout = self.loop.layout
        self.model = model
        self._engine: StackedEngine | VmapEngine
        try:
            self._engine = StackedEngine(model, self.loop)
        except CannotStackError:
            self._engine = VmapEngine(model, self.layout)
        self._proven: dict[tuple[str, bool], bool] = {}

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.loop.outputs(theta, x)

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        if not self._usable(GRADIENTS, batches):
            return self.loop.gradients(theta, batches, losses)
        try:
            found = self._engine.gradients(theta, batches, losses)
        except (CannotStackError, RuntimeError, AttributeError) as reason:
            self._give_up(GRADIENTS, reason)
            return self.loop.gradients(theta, batches, losses)
        if not self._known(GRADIENTS):
            few = slice(0, COMPARED)
            with exactly(theta.device):
                again = self._engine.gradients(theta[few], batches[few], losses)
                truth = self.loop.gradients(theta[few], batches[few], losses)
            if not self._compare(GRADIENTS, again, truth):
                return self.loop.gradients(theta, batches, losses)
        return found

    def descend(self, theta: Tensor, steps: Sequence[Sequence[Batch]], losses: Losses, rate: float) -> Tensor:
        done = 0
        while done < len(steps):
            rest = [batches for batches in steps[done:] if isinstance(batches, SideBySide)]
            proven = self._proven.get((GRADIENTS, self.model.training), False) and len(theta) > 1
            if proven and isinstance(self._engine, StackedEngine) and len(rest) == len(steps) - done:
                return self._engine.descend(theta, rest, losses, rate)
            theta = theta.sub(self.gradients(theta, steps[done], losses), alpha=rate)
            done += 1
        return theta

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, bounds: Sequence[float], rule: ClipRule
    ) -> tuple[Tensor, list[Tensor]]:
        if not self._usable(SUMS, batches):
            return self.loop.clipped_sums(theta, batches, losses, bounds, rule)
        try:
            found = self._engine.clipped_sums(theta, batches, losses, bounds, rule)
        except (CannotStackError, RuntimeError, AttributeError) as reason:
            self._give_up(SUMS, reason)
            return self.loop.clipped_sums(theta, batches, losses, bounds, rule)
        if not self._known(SUMS):
            few = slice(0, COMPARED)
            with exactly(theta.device):
                again, _ = self._engine.clipped_sums(theta[few], batches[few], losses, bounds[few], rule)
                truth, _ = self.loop.clipped_sums(theta[few], batches[few], losses, bounds[few], rule)
            if not self._compare(SUMS, again, truth):
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
        """Whether the loop agrees. It takes two clients with a gradient to prove that it always will."""
        finite = torch.isfinite(truth).all(1)
        found, truth = found[finite], truth[finite]
        error = torch.linalg.vector_norm((found - truth).double(), dim=1)
        size = torch.linalg.vector_norm(truth.double(), dim=1)
        if not bool((error <= _tolerance(truth) * size).all()):
            self._give_up(kind, CannotStackError("a forward pass in which rows are mixed"))
            return False
        if int((size > 0).sum()) > 1:
            self._proven[kind, self.model.training] = True
        return True


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Neither tf32 nor bf16, which flip enough ReLUs to make a model look like one that mixes rows."""
    with full_precision(device), torch.autocast(device.type, enabled=False):
        yield


def _tolerance(truth: Tensor) -> float:
    return 1e-8 if truth.dtype == torch.float64 else 1e-2
