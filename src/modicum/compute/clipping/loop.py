"""The plain backend: one client's model after another, through the per-example clipper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.clipping.capture import Graphs, filled_up, rounded_up
from modicum.compute.clipping.clipped_sum import Clipper
from modicum.compute.clipping.flat import Way, applies
from modicum.compute.clipping.problem import in_mode, rows
from modicum.compute.clipping.ranges import LOOKUPS, safe_lookups
from modicum.compute.clipping.sums import part_of
from modicum.compute.clipping.tracing import as_traced, looking_modules
from modicum.core.clips import Clip
from modicum.core.layout import Layout
from modicum.core.parts import Batch, Losses
from modicum.core.records import each, first_leaf

EVALUATION_BATCH = 2048
ALIGNED = 64  # bytes: where torch lets fresh memory begin, and the widest registers of a CPU


class LoopBackend:
    """Loads each row of the stack into one resident model. Works for every model; the reference for the others."""

    def __init__(self, model: nn.Module, way: Way = Way.AUTO) -> None:
        self.model, self.way = model, way
        self.layout = Layout.of(model)
        self._graphs = Graphs()
        self._clipped, self._looking = Clipper(model, way), looking_modules(model)
        self._lookups = [m for m in model.modules() if isinstance(m, LOOKUPS)]

    def _load(self, row: Tensor) -> None:
        self.layout.load(self.model, aligned(row))

    def outputs(self, theta: Tensor, x: Any) -> Tensor:
        size = rounded_up(len(first_leaf(x)))
        plain = isinstance(x, Tensor) and applies(self.way, theta.device.type)
        if not plain or not 0 < size <= EVALUATION_BATCH:
            return self._outputs(theta, x)
        frozen = (*(p for p in self.model.parameters() if not p.requires_grad), *self.model.buffers())
        key = tuple(t.data_ptr() for t in frozen)
        inputs = (theta, filled_up(x, size))
        (found,) = self._graphs.run(key, self._replayable, inputs, lambda: (theta, torch.zeros_like(inputs[1])))
        return found[: len(x)]

    def _replayable(self, theta: Tensor, x: Tensor) -> tuple[Tensor]:
        return (self._outputs(theta, x),)

    def _outputs(self, theta: Tensor, x: Any) -> Tensor:
        self._load(theta)
        starts = range(0, max(1, len(first_leaf(x))), EVALUATION_BATCH)
        safe = safe_lookups(self._lookups)
        with in_mode(self.model, training=False), torch.no_grad(), as_traced(self._looking), safe:
            return torch.cat([self.model(rows(x, slice(i, i + EVALUATION_BATCH))) for i in starts])

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        rows = [self._gradient(row, batch, losses) for row, batch in zip(theta, batches, strict=True)]
        return torch.stack(rows)

    def _gradient(self, row: Tensor, batch: Batch, losses: Losses) -> Tensor:
        if not len(batch):
            return torch.zeros_like(row)
        self._load(row)
        with safe_lookups(self._lookups):
            values = losses(self.model(each(aligned, batch.x)), batch.targets)
        if batch.present is None:
            loss = values.mean()
        else:
            kept = torch.where(batch.present, values, values.new_zeros(()))
            loss = kept.sum() / batch.present.sum().clamp(min=1)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        sums, norms = [], []
        for row, batch, clip in zip(theta, batches, clips, strict=True):
            self._load(row)
            weights = None if batch.present is None else batch.present.to(row.dtype)
            with part_of(batch.part_of):
                clipped = self._clipped(losses, each(aligned, batch.x), dict(batch.targets), clip, weights=weights)
            sums.append(self.layout.flatten(clipped.total))
            norms.append(clipped.norms)
        return torch.stack(sums), norms


def aligned(t: Tensor) -> Tensor:
    """The same numbers at the beginning of a block of memory.

    Libraries add in another order where a tensor begins elsewhere, and a row of a stack begins where its place in
    the stack says: a client's bits would depend on who else is there.
    """
    return t if t.data_ptr() % ALIGNED == 0 else t.clone()
