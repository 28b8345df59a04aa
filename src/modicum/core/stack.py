"""The batches of several clients for one step, gathered together when an engine wants them so."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.core.parts import Batch
from modicum.core.records import each, first_leaf, joined, leaves

JOIN = 1 << 23  # numbers


class Pool:
    """The records of several clients. They may be joined once, so that each step needs a single gather."""

    def __init__(self, records: Sequence[Batch]) -> None:
        self.records = tuple(records)
        starts = [0]
        for batch in self.records:
            starts.append(starts[-1] + len(batch))
        self.starts = starts
        self._joined: Batch | None = None

    @property
    def worth_joining(self) -> bool:
        """On a CPU a copy of everything costs more than the gathers it saves, unless it is small."""
        numbers = sum(leaf[:1].numel() for _, leaf in leaves(self.records[0].x))
        return self.records[0].device.type == "cuda" or self.starts[-1] * numbers <= JOIN

    @property
    def joined(self) -> Batch:
        """All clients' records in one batch, made when first asked for."""
        if self._joined is None:
            x, targets = ([getattr(b, part) for b in self.records] for part in ("x", "targets"))
            self._joined = Batch(joined(x), joined(targets))
        return self._joined

    def batches(self, chosen: Sequence[Tensor]) -> PooledBatches:
        """The chosen records of the first clients of the pool, by index within each client."""
        return PooledBatches(self, chosen)


class Gathered(Sequence[Batch]):
    """A batch for each client, made only when it is looked at; `padded` gives all of them at once."""

    sizes: list[int]

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, i: int) -> Batch: ...
    @overload
    def __getitem__(self, i: slice) -> list[Batch]: ...
    def __getitem__(self, i: int | slice) -> Batch | list[Batch]:
        if isinstance(i, slice):
            return [self.one(j) for j in range(*i.indices(len(self)))]
        return self.one(i)

    @abstractmethod
    def one(self, i: int) -> Batch:
        """Client i's batch."""

    @abstractmethod
    def padded(self, size: int) -> tuple[Any, dict[str, Tensor]]:
        """Inputs (clients · size, …), short batches filled up, and the targets of the real rows alone."""


class PooledBatches(Gathered):
    """Records chosen from a pool, by index within each client."""

    def __init__(self, pool: Pool, chosen: Sequence[Tensor]) -> None:
        self.pool, self.chosen = pool, tuple(chosen)
        self.sizes = [index.shape[0] for index in self.chosen]

    def one(self, i: int) -> Batch:
        return self.pool.records[i].take(self.chosen[i])

    def rows(self, size: int) -> Tensor:
        """(clients · size,) rows of the joined records. A client's own first record fills it up: no row of the
        stack ever mixes two clients.

        By numpy: torch would wake all of its threads for a few thousand numbers.
        """
        starts = np.asarray(self.pool.starts[: len(self)])
        filled = np.repeat(starts, size)
        real = np.concatenate([index.numpy() for index in self.chosen]) + np.repeat(starts, self.sizes)
        filled[_real(self.sizes, size)] = real
        return torch.from_numpy(filled)

    def padded(self, size: int) -> tuple[Any, dict[str, Tensor]]:
        if not self.pool.worth_joining:
            return padded(list(self), size)
        whole, rows = self.pool.joined, self.rows(size)
        real = rows if min(self.sizes) == size else rows[real_rows(self.sizes, size)]
        rows, real = (index.to(whole.device, non_blocking=True) for index in (rows, real))
        x = each(lambda t: t.index_select(0, rows), whole.x)
        return x, {n: t.index_select(0, real) for n, t in whole.targets.items()}


class SideBySide(Gathered):
    """Equal batches that already lie side by side in memory: x and every target are (clients, size, …)."""

    def __init__(self, x: Any, targets: Mapping[str, Tensor]) -> None:
        self.x, self.targets = x, targets
        clients, size = first_leaf(x).shape[:2]
        self.sizes = [size] * clients

    @classmethod
    def steps(cls, records: Sequence[Batch], steps: int) -> list[SideBySide]:
        """Records that each client's steps use in order, laid out so that a step's rows are one run of memory."""
        x, targets = (_by_step([getattr(b, part) for b in records], steps) for part in ("x", "targets"))
        return [cls(each(itemgetter(step), x), each(itemgetter(step), targets)) for step in range(steps)]

    def one(self, i: int) -> Batch:
        return Batch(each(itemgetter(i), self.x), each(itemgetter(i), self.targets))

    def padded(self, size: int) -> tuple[Any, dict[str, Tensor]]:
        x, targets = (each(lambda t: t.flatten(0, 1), tree) for tree in (self.x, self.targets))
        return x, targets


def has_blanks(batches: Sequence[Batch]) -> bool:
    """Whether rows of some batch count for nothing; a stack has no weights, so that those go client by client."""
    if isinstance(batches, SideBySide):
        return False
    records = batches.pool.records if isinstance(batches, PooledBatches) else batches
    return any(batch.present is not None for batch in records)


def _by_step(trees: Sequence[Any], steps: int) -> Any:
    def stacked(*parts: Tensor) -> Tensor:
        return torch.stack([part.view(steps, len(part) // steps, *part.shape[1:]) for part in parts], dim=1)

    return each(stacked, trees[0], *trees[1:])


def padded(batches: Sequence[Batch], size: int) -> tuple[Any, dict[str, Tensor]]:
    """Inputs (clients · size, …), short batches filled up with zeros, and the targets of the real rows alone."""
    inputs, targets = [batch.x for batch in batches], joined([dict(batch.targets) for batch in batches])
    if all(len(batch) == size for batch in batches):
        return joined(inputs), targets

    def filled(*parts: Tensor) -> Tensor:
        x = parts[0].new_zeros(len(parts), size, *parts[0].shape[1:])
        for row, part in zip(x, parts, strict=True):
            row[: len(part)] = part
        return x.flatten(0, 1)

    return each(filled, inputs[0], *inputs[1:]), targets


def real_rows(sizes: Sequence[int], size: int) -> Tensor:
    """Where the real rows stand in the padded stack."""
    return torch.from_numpy(np.flatnonzero(_real(sizes, size)))


def _real(sizes: Sequence[int], size: int) -> NDArray[np.bool_]:
    return (np.arange(size) < np.asarray(sizes)[:, None]).reshape(-1)
