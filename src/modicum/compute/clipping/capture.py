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

from modicum.compute.clipping.problem import without_drawing
from modicum.compute.clipping.rounding import product_rounding

Work = Callable[..., tuple[Tensor, ...]]
"""Tensors in, tensors out; no question to the device on the way."""

Replay = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""The same work on other inputs of the same shapes."""

Agrees = Callable[[Sequence[Tensor], Sequence[Tensor]], bool]
"""Whether a first replay gives what the work itself gave."""

REPEATED = 2
"""Calls of equal shape that run as they are before one is captured."""

KEPT = 12
"""Graphs that are kept; the one that was not used for longest goes first."""


ASIDE = 1 << 16
"""Numbers of an answer that is compared later, from which on it waits in the computer's memory."""

WATCHED = 64
"""Shapes whose calls are counted."""


class CannotCaptureWarning(UserWarning):
    """Work that can be neither replayed nor compiled runs launch by launch; said once, with the reason."""


def rounded_up(size: int) -> int:
    """The next of few sizes, at most 7 or an eighth larger: batches are filled up to it, so that shapes repeat."""
    step = max(8, (1 << size.bit_length()) >> 4)
    return -(-size // step) * step


def filled_up(rows: Tensor, size: int) -> Tensor:
    """`size` rows, of which the further ones repeat the first."""
    return rows if len(rows) == size else torch.cat([rows, rows[:1].expand(size - len(rows), *rows.shape[1:])])


class Captured:
    """One graph with its own copies of the inputs. Answers are copies too: a replay overwrites its own memory."""

    def __init__(self, work: Work, inputs: Sequence[Tensor], pool: Any) -> None:
        self.inputs = [t.detach().clone() for t in inputs]
        self.device = self.inputs[0].device
        kinds = {t.dtype for t in inputs}  # one launch copies any number of tensors of one kind
        self.alike = [[i for i, t in enumerate(inputs) if t.dtype == kind] for kind in kinds]
        work = _without_cast_cache(work)
        with torch.cuda.device(self.device):  # a stream of another device would record nothing
            self._warm_up(work, inputs)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):
                self.outputs = work(*self.inputs)

    def _warm_up(self, work: Work, inputs: Sequence[Tensor]) -> None:
        """Libraries choose kernels and take workspaces on their first calls."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work(*self.inputs)
            if not agree(self.inputs, inputs, 0.0):
                raise RuntimeError("it changes its inputs")
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.cuda.device(self.device):
            for alike in self.alike:
                torch._foreach_copy_([self.inputs[i] for i in alike], [inputs[i] for i in alike])
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

    def __init__(
        self,
        make: Callable[[Work, Sequence[Tensor], Any], Replay] = Captured,
        after: int = REPEATED,
        agrees: Agrees | None = None,
    ) -> None:
        self._make, self._after, self._agrees = make, after, agrees or agree
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._kept: OrderedDict[Hashable, Replay] = OrderedDict()
        self.refused = False
        self._pool: Any = None  # memory that all graphs share: answers are copied before the next replay

    def run(
        self,
        key: Hashable,
        work: Work,
        inputs: Sequence[Tensor],
        blank: Callable[[], Sequence[Tensor]] | None = None,
    ) -> tuple[Tensor, ...]:
        """`key` names everything but the inputs' values that the work depends on. It is captured and compared on
        inputs that `blank` makes, so that no record decides whether it is replayed."""
        if self.refused:
            return work(*inputs)
        key = (key, _surroundings(inputs))
        found = self._kept.get(key)
        if found is None:
            if not self._repeats(key):
                return work(*inputs)
            found = self._captured(work, inputs if blank is None else blank())
            if found is None:
                return work(*inputs)
            self._keep(key, found)
        self._kept.move_to_end(key)
        return found(inputs)

    def _repeats(self, key: Hashable) -> bool:
        self._seen[key] = self._seen.pop(key, 0) + 1
        if len(self._seen) > WATCHED:  # a loss that is made anew for each call would otherwise be kept for ever
            self._seen.popitem(last=False)
        return self._seen[key] > self._after

    def _captured(self, work: Work, inputs: Sequence[Tensor]) -> Replay | None:
        if self._pool is None and inputs[0].is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
        with without_drawing(inputs[0].device):
            truth = aside(work(*inputs))
        try:
            with without_drawing(inputs[0].device):
                found = self._make(work, inputs, self._pool)
                again = found(inputs)
        except Exception as reason:  # compilers fail in many ways, and the work itself has just succeeded
            self._refuse(f"{type(reason).__name__}: {' '.join(str(reason).split())[:160]}")
            return None
        if self._agrees(again, truth):
            return found
        self._refuse("a replay gives other numbers, so it reads more than its inputs")
        return None

    def _refuse(self, reason: str) -> None:
        self.refused = True
        warnings.warn(f"this work runs launch by launch: {reason}", CannotCaptureWarning, stacklevel=5)

    def _keep(self, key: Hashable, found: Replay) -> None:
        self._kept[key] = found
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)


def aside(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Large ones wait beside the device, whose memory a capture needs."""
    return tuple(t.cpu() if t.is_cuda and t.numel() > ASIDE else t for t in tensors)


def agree(found: Sequence[Tensor], truth: Sequence[Tensor], tolerance: float = 1e-3) -> bool:
    """Each answer, up to the rounding of its own numbers and a little of everybody's, where terms cancel."""
    device = found[0].device

    def sizes_of(f: Tensor, t: Tensor) -> Tensor:
        t = t.to(device).double().nan_to_num()
        return torch.stack([torch.linalg.vector_norm(v) for v in (t, f.double().nan_to_num() - t)])

    sizes, off = torch.stack([sizes_of(f, t) for f, t in zip(found, truth, strict=True)]).unbind(1)
    coarse = product_rounding(device, torch.float32) > 0 or torch.is_autocast_enabled(device.type)
    return bool((off <= tolerance * (sizes + (0.1 if coarse else 1e-3) * torch.linalg.vector_norm(sizes))).all())


def _surroundings(inputs: Sequence[Tensor]) -> Hashable:
    """Shapes, and the switches that change what kernels compute."""
    device = inputs[0].device
    half = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    shapes = tuple((t.shape, t.dtype, t.stride()) for t in inputs)
    return shapes, half, product_rounding(device, torch.float32)
