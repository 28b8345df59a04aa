"""Before the first record: whether each loss of somebody's loop is of its own record alone.

The loop is given a few batches of synthetic rows, in the shapes of its real ones. From the first, the books of
model and loss are judged (`compute.probe`). In the others every second row is changed, or blank: the losses, norms
and gradients of the rest must keep their bits (R16). So no decision about the loop reads a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modicum.compute.clipping.clipped_sum import name_untrained
from modicum.compute.clipping.open_pass import OpenPass, unsupported
from modicum.compute.clipping.problem import ClippedSum
from modicum.compute.clipping.synthetic import synthetic_rows
from modicum.core.clips import Clip
from modicum.core.parts import Batch

MIXED = "a loss or a gradient of one record that depends on the other records of its batch"


class Rehearsal:
    """The batches of a rehearsal, and what is asked of the losses that come back.

    Args:
        model: What the loop trains.
        batch: A batch of the loop's shapes; none of its numbers is read.
        clip: As in the loop.
    """

    def __init__(self, model: nn.Module, batch: Batch, clip: Clip) -> None:
        self._model, self._clip = model, clip
        size, targets = len(batch), dict(batch.targets)
        drawn = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        self._first, self._other = (synthetic_rows(model, batch.x, targets, size, d) for d in drawn)
        self._kept = torch.arange(size) % 2 == 0
        self._base: _Seen | None = None

    def batches(self) -> Iterator[Batch]:
        """The first is for the books, the second is what later ones are compared with; in the last every second
        row is nobody's, since a loss may not depend on how many were drawn."""
        everybody, blank = torch.ones_like(self._kept), tree_map(torch.zeros_like, self._first)
        for other, present in (
            (self._first, everybody),
            (self._first, everybody),
            (self._other, everybody),
            (blank, self._kept),
        ):
            x, targets = tree_map(self._every_second, self._first, other)
            yield Batch(x, targets, present)

    def _every_second(self, mine: Tensor, other: Tensor) -> Tensor:
        return torch.where(self._kept.to(mine.device).view(-1, *(1,) * (mine.dim() - 1)), mine, other)

    def judge(self, opened: OpenPass, losses: Tensor) -> None:
        """What the loop made of a batch."""
        losses = opened.check(losses)
        if opened.probe:
            name_untrained(self._model, opened.judge(losses))
            return
        told = losses.detach().clone()
        weights = self._kept.to(told)
        seen = _Seen(told, opened.settle(losses, self._clip, weights))
        if self._base is None:
            self._base = seen
        elif not seen.same(self._base, self._kept):
            raise unsupported(self._model, Exception(MIXED))


@dataclass(frozen=True)
class _Seen:
    losses: Tensor
    clipped: ClippedSum

    def same(self, other: _Seen, kept: Tensor) -> bool:
        kept = kept.to(self.losses.device)
        pairs = [(self.losses[kept], other.losses[kept]), (self.clipped.norms[kept], other.clipped.norms[kept])]
        pairs += [(total, other.clipped.total[name]) for name, total in self.clipped.total.items()]
        exact = self.losses.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        return all(torch.equal(a, b) if exact else _near(a, b) for a, b in pairs)


def _near(one: Tensor, other: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(one - other) <= 1e-2 * torch.linalg.vector_norm(one) + 1e-6)
