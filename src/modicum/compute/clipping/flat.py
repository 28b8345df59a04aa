"""A clipped sum as a function of tensors alone, so that a GPU can replay or a compiler fuse it.

The books of one batch are kept as always, but the model's parameters and buffers, the bounds, the weights and the
batch all come in as tensors of fixed shape. Batches are filled up with their first example, at weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from modicum.compute.clipping.bookkeeping import PassRecorder
from modicum.compute.clipping.capture import Captured, Graphs, Replay, Work, agree, filled_up, rounded_up
from modicum.compute.clipping.problem import (
    ClippedSum,
    Loss,
    Parts,
    modes,
    sum_dtype,
)
from modicum.compute.clipping.rounding import product_rounding
from modicum.compute.clipping.sums import rows_counted
from modicum.core.clips import Clip

LARGE = 1 << 28
"""More trained parameters than these (1 GiB) are not replayed: each graph holds a copy of them and of their sum.
Frozen ones are read where they are."""

FLIPS, COARSE_FLIPS = 0.01, 0.25
"""How far a compiled parameter's sum may be off on its first batch: other rounding flips some ReLUs, tf32 many."""

NORMS, COARSE_NORMS = 0.001, 0.05
"""The same for each example's norm, on which the bound hangs."""


PAIR: TreeSpec = tree_structure((0, 0))
"""Of inputs and labels that are a tensor each."""


class Way(StrEnum):
    """How a clipped sum is run. The sums are the same; those of a compiler up to rounding."""

    AUTO = "auto"  # on a GPU, the work of small models is replayed where it repeats itself
    EAGER = "eager"  # launch by launch
    COMPILED = "compiled"  # compiled on the first batch of a shape


def applies(way: Way, device: str) -> bool:
    """A matter of the configuration alone, never of how many batches came before."""
    return way is Way.COMPILED or (way is Way.AUTO and device == "cuda")


def takes(problem: Problem, way: Way) -> bool:
    """Whether a problem goes this way: its device can, its model is small enough, its batch can be filled up."""
    if not applies(way, problem.device.type):
        return False
    return (way is Way.COMPILED or not problem.large) and problem.fits


@dataclass(frozen=True)
class Problem:
    """What is asked of one batch."""

    model: nn.Module
    trained: dict[str, nn.Parameter]
    loss: Loss
    x: Any
    y: Any
    clip: Clip
    weights: Tensor | None
    examples: int
    parts: Parts
    shared: tuple[frozenset[int], ...] = ()  # see `bookkeeping.shared_inputs`

    def key(self) -> Hashable:
        """All that the function below depends on besides its inputs and their shapes."""
        frozen = tuple(p.data_ptr() for p in self.parts.parameters if not self._moves(p))
        surroundings = rows_counted(0), frozen  # of the step that this is a part of
        return self.loss, self.clip.kind, tuple(self.trained), modes(self.model), str(self.batch[1]), surroundings

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return next(iter(self.trained.values())).device

    @property
    def large(self) -> bool:
        """Whether the trained parameters are too many for this way to gain anything."""
        return sum(p.numel() for p in self.trained.values()) > LARGE

    @property
    def fits(self) -> bool:
        """Whether this is a function of tensors."""
        return isinstance(self.loss, Hashable) and all(isinstance(leaf, Tensor) for leaf in self.batch[0])

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(id(p) for p in self.trained.values())

    def _moves(self, p: Tensor) -> bool:
        """Whether other numbers may lie elsewhere at the next call; frozen parameters stay where they are."""
        return id(p) in self._ids

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """Trained parameters and buffers by name, each once; one walk, since a GPU waits for it."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in self.parts.named:
            trained = ((name, p) for name, p in module._parameters.items() if p is not None and self._moves(p))
            for name, t in (*trained, *module._buffers.items()):
                if t is not None:
                    found.setdefault(id(t), (f"{prefix}.{name}" if prefix else name, t))
        return {name: t.detach() for name, t in found.values()}

    @cached_property
    def batch(self) -> tuple[list[Any], TreeSpec]:
        """Inputs and labels as a flat list of tensors, and the tree to put them back with."""
        if type(self.x) is type(self.y) is Tensor:  # a walk would take a twentieth of a small model's step
            return [self.x, self.y], PAIR
        leaves, tree = tree_flatten((self.x, self.y))
        return leaves, tree

    def inputs(self, size: int) -> list[Tensor]:
        """All that the captured work reads, filled up to `size` rows whose weights are zero."""
        first = next(iter(self.trained.values()))
        real = (torch.arange(size, device=first.device) < self.examples).to(sum_dtype(first))
        if self.weights is not None:
            real[: self.examples] *= self.weights.to(real)
        bounds = torch.tensor(self.clip.values, dtype=real.dtype).to(first.device, non_blocking=True)
        rows = (filled_up(leaf, size) for leaf in self.batch[0])
        return [*self.state.values(), bounds, real, *rows]

    def work(self, size: int) -> Work:
        """The clipped sum as a function of tensors alone, for batches of this size."""
        names, tree = list(self.state), self.batch[1]

        def clipped(*inputs: Tensor) -> tuple[Tensor, ...]:
            state, (bounds, weights, *batch) = inputs[: len(names)], inputs[len(names) :]
            x, y = tree_unflatten(batch, tree)
            recorder = PassRecorder(self.model, self.trained, size, shared=self.shared)
            recorder.backward(recorder.forward(self.loss, x, y, dict(zip(names, state, strict=True))))
            with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
                clip = self.clip.with_values(bounds.unbind())  # a bound that changes asks for no new graph
                total, norms = recorder.settle(clip, weights)
            return (*total.values(), norms)

        return clipped


class FlatSums:
    """The clipped sums of one model, replayed or compiled where a shape repeats."""

    def __init__(self) -> None:
        self.replayed = Graphs()
        self.compiled = Graphs(compile_work, 0, compiled_agrees)

    def run(self, problem: Problem, way: Way, blank: Callable[[], Problem]) -> ClippedSum:
        """`blank`: the same with synthetic rows, on which it is settled whether this is replayed."""
        graphs = self.compiled if way is Way.COMPILED else self.replayed
        size = rounded_up(problem.examples)
        *sums, norms = graphs.run(
            problem.key(), problem.work(size), problem.inputs(size), lambda: blank().inputs(size)
        )
        return ClippedSum(dict(zip(problem.trained, sums, strict=True)), norms[: problem.examples])


def compile_work(work: Work, inputs: Sequence[Tensor], pool: object) -> Replay:
    """One graph of forward pass, backward pass to the layers' outputs, norms and sums, for torch's compiler."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def laid_out(*tensors: Tensor) -> tuple[Tensor, ...]:
        return work(*map(_channels_last, tensors))

    with torch.autograd.set_multithreading_enabled(False):  # the tracer listens on this thread alone
        graph = make_fx(laid_out, tracing_mode="fake")(*inputs)
    fused = fuse(graph)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):  # its casts are in the graph
            return tuple(fused(*tensors))

    return Captured(run, inputs, pool) if inputs[0].is_cuda else lambda tensors: run(*tensors)


def compiled_agrees(found: Sequence[Tensor], truth: Sequence[Tensor]) -> bool:
    """Norms example by example, sums parameter by parameter."""
    device = found[-1].device
    coarse = product_rounding(device, found[-1].dtype) > 0 or torch.is_autocast_enabled(device.type)
    flips, off = (COARSE_FLIPS, COARSE_NORMS) if coarse else (FLIPS, NORMS)
    if not agree(found[:-1], truth[:-1], flips):
        return False
    norms, expected = (t.to(device).nan_to_num().double() for t in (found[-1], truth[-1]))
    typical = expected.square().mean().sqrt()
    return bool(((norms - expected).abs() <= off * (expected + 0.2 * typical)).all())


def _channels_last(t: Tensor) -> Tensor:
    """The layout that a GPU's convolutions work in; the tracer follows it through the graph."""
    return t.contiguous(memory_format=torch.channels_last) if t.is_cuda and t.dim() == 4 else t


def fuse(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """The graph with its operations joined into fewer kernels."""
    return torch.compile(graph, fullgraph=True, dynamic=False)
