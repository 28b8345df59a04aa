"""The stacked backend: clients of a round, or the configurations of a grid, as one batched computation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller

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
GRADIENTS, SUMS = "gradients", "clipped_sums"  # methods of an engine
BYTES = 0.03
"""Memory that a number of a record takes on its way through a model, for each of the model's parameters: what a
language model of 30 layers keeps of a token, doubled."""

FAILURES = (CannotStackError, RuntimeError, AttributeError)

Engine = StackedEngine | VmapEngine | LoopBackend


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
        self._proven: dict[tuple[str, bool], bool] = {}  # by method and by the model's mode
        self._worked: set[tuple[str, bool]] = set()

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.loop.outputs(theta, x)

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        with as_traced(self._looking):  # whether a mask is all ones is nothing that clients side by side decide
            if not has_blanks(batches) and self._stacks(GRADIENTS, theta, batches, losses):
                with self._trying(GRADIENTS):
                    found = [self._engine.gradients(*part, losses) for part in self._parts(theta, batches)]
                    return found[0] if len(found) == 1 else torch.cat(found)
            return self.loop.gradients(theta, batches, losses)

    def descend(self, theta: Tensor, steps: Sequence[Sequence[Batch]], losses: Losses, rate: float) -> Tensor:
        engine = self._engine
        rest = [batches for batches in steps if isinstance(batches, SideBySide)]
        if not isinstance(engine, StackedEngine) or len(rest) < len(steps):
            return self._descend(theta, steps, losses, rate)
        for done, batches in enumerate(rest):
            if not self._stacks(GRADIENTS, theta, batches, losses):
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
        alike = len({clip.kind for clip in clips}) == 1  # factors of a stack are one computation
        alike = alike and isinstance(batches[0].x, Tensor)  # a mapped call would hold every example's gradient
        if alike and not has_blanks(batches) and self._stacks(SUMS, theta, batches, losses, clips):
            with self._trying(SUMS):
                return self._engine.clipped_sums(theta, batches, losses, clips)
        return self.loop.clipped_sums(theta, batches, losses, clips)

    @contextmanager
    def _trying(self, kind: str) -> Iterator[None]:
        """The first stack of all clients may fail, and then the loop has its turn for good."""
        now = kind, self.model.training
        try:
            yield
        except FAILURES as reason:
            if now in self._worked:  # errors of what worked before are real ones: out of memory, for instance
                raise
            self._give_up(kind, reason)
        else:
            self._worked.add(now)

    def _stacks(
        self, kind: str, theta: Tensor, batches: Sequence[Batch], losses: Losses, *clips: Sequence[Clip]
    ) -> bool:
        """Whether the stack computes this. Until it is proven, a few first clients are computed both ways as well;
        nothing but the verdict is used of that, so that a proof changes no number."""
        if len(batches) < 2 or self._known(kind):
            return len(batches) > 1 and self._proven[kind, self.model.training]
        few = methodcaller(kind, theta[FIRST], batches[FIRST], losses, *(own[FIRST] for own in clips))
        try:
            with exactly(self._device), without_drawing(self._device):
                found, truth = few(self._engine), few(self.loop)
        except FAILURES as reason:
            self._give_up(kind, reason)
            return False
        return self._compare(kind, found, truth) if kind == GRADIENTS else self._compare(kind, found[0], truth[0])

    def _parts(self, theta: Tensor, batches: Sequence[Batch]) -> list[tuple[Tensor, Sequence[Batch]]]:
        """Clients whose records fit into a GPU's memory together, by public shapes."""
        if self._device.type != "cuda" or isinstance(batches[0].x, Tensor):
            return [(theta, batches)]
        numbers = max(map(len, batches)) * first_leaf(batches[0].x)[0].numel()
        numbers *= sum(p.numel() for p in self.model.parameters())
        room = torch.cuda.get_device_properties(self._device).total_memory / BYTES
        most = max(1, int(room / max(1, numbers)))
        if most >= len(batches):
            return [(theta, batches)]
        return [(theta[i : i + most], batches[i : i + most]) for i in range(0, len(batches), most)]

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
