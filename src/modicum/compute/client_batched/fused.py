"""The stacked backend: clients of a round, or the configurations of a grid, as one batched computation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from modicum.compute.client_batched.model import CannotStackError
from modicum.compute.client_batched.stacked import StackedEngine
from modicum.compute.client_batched.vmapped import VmapEngine
from modicum.compute.clipping.loop import LoopBackend
from modicum.compute.clipping.problem import without_drawing
from modicum.compute.clipping.rounding import full_precision
from modicum.compute.clipping.tracing import as_traced, looking_modules
from modicum.core.clips import Clip
from modicum.core.parts import Batch, Losses
from modicum.core.records import first_leaf
from modicum.core.stack import SideBySide, has_blanks

FIRST = slice(0, 3)  # clients whose first results are compared with the loop's
GRADIENTS, SUMS = "gradients", "clipped sums"
BYTES = 0.03
"""Memory that a number of a record takes on its way through a model, for each of the model's parameters: what a
language model of 30 layers keeps of a token, doubled."""

FAILURES = (CannotStackError, RuntimeError, AttributeError)

Engine = StackedEngine | VmapEngine | LoopBackend
T = TypeVar("T")


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
        self.model, self._looking = model, looking_modules(model)
        self._engine: Engine
        try:
            self._engine = StackedEngine(model, self.loop)
        except CannotStackError:
            self._engine = VmapEngine(model, self.layout)
        self._proven: dict[tuple[str, bool], bool] = {}

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.loop.outputs(theta, x)

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        def few(engine: Engine) -> Tensor:
            return engine.gradients(theta[FIRST], batches[FIRST], losses)

        def all_of(engine: Engine) -> Tensor:
            if most >= len(batches):
                return engine.gradients(theta, batches, losses)
            parts = [slice(i, i + most) for i in range(0, len(batches), most)]
            return torch.cat([engine.gradients(theta[part], batches[part], losses) for part in parts])

        if has_blanks(batches):
            return self.loop.gradients(theta, batches, losses)
        most = self._at_once(batches)
        with as_traced(self._looking):  # whether a mask is all ones is nothing that clients side by side decide
            return self._by_either(GRADIENTS, batches, few, all_of)

    def descend(self, theta: Tensor, steps: Sequence[Sequence[Batch]], losses: Losses, rate: float) -> Tensor:
        engine = self._engine
        rest = [batches for batches in steps if isinstance(batches, SideBySide)]
        if not isinstance(engine, StackedEngine) or len(rest) < len(steps):
            return self._descend(theta, steps, losses, rate)
        for done, batches in enumerate(rest):

            def few(engine: Engine, theta: Tensor = theta, batches: SideBySide = batches) -> Tensor:
                return engine.gradients(theta[FIRST], batches[FIRST], losses)

            if not self._stacks(GRADIENTS, batches, few):
                return self._descend(theta, steps[done:], losses, rate)
            if self._known(GRADIENTS):
                return engine.descend(theta, rest[done:], losses, rate)
            theta = engine.descend(theta, [batches], losses, rate)
        return theta

    def _descend(self, theta: Tensor, steps: Sequence[Sequence[Batch]], losses: Losses, rate: float) -> Tensor:
        for batches in steps:
            theta = theta.sub(self.gradients(theta, batches, losses), alpha=rate)
        return theta

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        def few(engine: Engine) -> Tensor:
            return engine.clipped_sums(theta[FIRST], batches[FIRST], losses, clips[FIRST])[0]

        def all_of(engine: Engine) -> tuple[Tensor, list[Tensor]]:
            return engine.clipped_sums(theta, batches, losses, clips)

        # Factors of a stack are one computation, and a mapped call would hold the gradient of every example.
        mixed = len({clip.kind for clip in clips}) > 1
        if mixed or has_blanks(batches) or (batches and not isinstance(batches[0].x, Tensor)):
            return all_of(self.loop)
        return self._by_either(SUMS, batches, few, all_of)

    def _by_either(
        self, kind: str, batches: Sequence[Batch], few: Callable[[Engine], Tensor], all_of: Callable[[Engine], T]
    ) -> T:
        new = not self._known(kind)
        if self._stacks(kind, batches, few):
            try:
                return all_of(self._engine)
            except FAILURES as reason:
                if not new:  # errors of a model that worked before are real ones: out of memory, for instance
                    raise
                self._give_up(kind, reason)
        return all_of(self.loop)

    def _stacks(self, kind: str, batches: Sequence[Batch], few: Callable[[Engine], Tensor]) -> bool:
        """Whether the stack computes this. Until it is proven, `few` first clients are computed both ways as well;
        nothing but the verdict is used of that, so that a proof changes no number."""
        if len(batches) < 2 or self._known(kind):
            return len(batches) > 1 and self._proven[kind, self.model.training]
        try:
            with exactly(self._device), without_drawing(self._device):
                found, truth = few(self._engine), few(self.loop)
        except FAILURES as reason:
            self._give_up(kind, reason)
            return False
        return self._compare(kind, found, truth)

    def _at_once(self, batches: Sequence[Batch]) -> int:
        """Clients whose records fit into a GPU's memory together, by public shapes."""
        if self._device.type != "cuda" or not batches or isinstance(batches[0].x, Tensor):
            return len(batches)
        numbers = max(map(len, batches)) * first_leaf(batches[0].x)[0].numel()
        numbers *= sum(p.numel() for p in self.model.parameters())
        room = torch.cuda.get_device_properties(self._device).total_memory / BYTES
        return max(1, int(room / max(1, numbers)))

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters(), torch.zeros(())).device

    @property
    def _tolerance(self) -> float:
        """By what the model computes in: sums of many examples are float64 whatever their terms were."""
        exact = all(p.dtype == torch.float64 for p in self.model.parameters())
        return 1e-8 if exact else 1e-2

    def _known(self, kind: str) -> bool:
        return (kind, self.model.training) in self._proven

    def _give_up(self, kind: str, reason: Exception) -> None:
        self._proven[kind, self.model.training] = False
        warnings.warn(
            f"{type(self.model).__name__} runs client by client because of {' '.join(str(reason).split())}",
            SlowEngineWarning,
            stacklevel=5,
        )

    def _compare(self, kind: str, found: Tensor, truth: Tensor) -> bool:
        """Whether the loop agrees. It takes two clients with a gradient to prove that it always will."""
        finite = torch.isfinite(truth).all(1)
        found, truth = found[finite], truth[finite]
        error = torch.linalg.vector_norm((found - truth).double(), dim=1)
        size = torch.linalg.vector_norm(truth.double(), dim=1)
        if not bool((error <= self._tolerance * size).all()):
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
