"""CUDA graphs of work that is repeated with the same shapes: one launch in place of hundreds.

What is captured must be a function of its input tensors alone: whatever else it reads is frozen into the graph.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from modicum.clipping.rounding import product_rounding

Work = Callable[..., tuple[Tensor, ...]]
"""Tensors in, tensors out; no question to the device on the way."""

Replay = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""The same work on other inputs of the same shapes."""

REPEATED = 2
"""Calls of equal shape that run as they are before one is captured."""

KEPT = 12
"""Graphs that are kept; the one that was not used for longest goes first."""


class CannotCaptureWarning(UserWarning):
    """Work that asks the device for an answer midway runs launch by launch; said once, with the reason."""


class Captured:
    """One graph with its own copies of the inputs. Answers are copies too: a replay overwrites its own memory."""

    def __init__(self, work: Work, inputs: Sequence[Tensor], pool: Any) -> None:
        self.inputs = [t.detach().clone() for t in inputs]
        work = _without_cast_cache(work)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries choose kernels and take workspaces on their first calls
            work(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outputs = work(*self.inputs)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return tuple(t.clone() for t in self.outputs)


def _without_cast_cache(work: Work) -> Work:
    """Autocast keeps its casts of weights for the next call, which in a graph would be a weight of long ago."""
    if not torch.is_autocast_enabled("cuda"):
        return work
    dtype = torch.get_autocast_dtype("cuda")

    def uncached(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", dtype, cache_enabled=False):
            return work(*inputs)

    return uncached


class Graphs:
    """Runs work as it is until it repeats itself, then as a graph."""

    def __init__(self, make: Callable[[Work, Sequence[Tensor], Any], Replay] = Captured) -> None:
        self._make = make
        self._seen: dict[Hashable, int] = {}
        self._kept: OrderedDict[Hashable, Replay] = OrderedDict()
        self._refused = False
        self._pool: Any = None  # memory that all graphs share: answers are copied before the next replay

    def run(self, key: Hashable, work: Work, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`key` names everything but the inputs' values that the work depends on."""
        if self._refused:
            return work(*inputs)
        key = (key, _surroundings(inputs))
        found = self._kept.get(key)
        if found is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= REPEATED:
                return work(*inputs)
            truth = work(*inputs)
            found = self._capture(work, inputs)
            if found is None or not self._agrees(found(inputs), truth):
                return truth
            self._keep(key, found)
        self._kept.move_to_end(key)
        return found(inputs)

    def _capture(self, work: Work, inputs: Sequence[Tensor]) -> Replay | None:
        if self._pool is None and inputs[0].is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return self._make(work, inputs, self._pool)
        except RuntimeError as reason:
            self._refuse(" ".join(str(reason).split())[:160])
            return None

    def _agrees(self, found: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
        """Whether the first replay gives what the work itself gives: else it reads more than its inputs."""
        if all(_close(one, other) for one, other in zip(found, truth, strict=True)):
            return True
        self._refuse("its replay gives other numbers")
        return False

    def _refuse(self, reason: str) -> None:
        self._refused = True
        warnings.warn(f"no CUDA graph of this work: {reason}", CannotCaptureWarning, stacklevel=5)

    def _keep(self, key: Hashable, found: Replay) -> None:
        self._kept[key] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)


def _close(found: Tensor, truth: Tensor) -> bool:
    """The order of additions may differ from call to call, nothing else."""
    if not truth.is_floating_point():
        return torch.equal(found, truth)
    found, truth = found.nan_to_num().double(), truth.nan_to_num().double()
    off = torch.linalg.vector_norm(found - truth)
    return bool(off <= 1e-3 * torch.linalg.vector_norm(truth))


def _surroundings(inputs: Sequence[Tensor]) -> Hashable:
    """Shapes, and the switches that change what kernels compute."""
    device = inputs[0].device
    half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    shapes = tuple((t.shape, t.dtype, t.stride()) for t in inputs)
    return shapes, half, product_rounding(device, torch.float32)
