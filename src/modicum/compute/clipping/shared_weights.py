"""One weight that several calls use: a layer called again, or an output layer tied to its embedding.

What the calls give it is joined before it is measured, so that a sum of gradients is measured and not its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.compute.clipping.pieces import Dense, EmbeddingRows, EmbeddingWeight, Kept, LinearWeight, Piece
from modicum.compute.clipping.sums import room_for_one_more


def joined(pieces: Sequence[Piece]) -> Piece:
    """The gradients of one weight through all its calls."""
    linear = [piece for piece in pieces if isinstance(piece, LinearWeight)]
    lookups = [piece for piece in pieces if isinstance(piece, EmbeddingWeight)]
    if len(pieces) == 1:
        return pieces[0]
    if len(linear) + len(lookups) < len(pieces):
        return Dense(torch.stack([piece.dense() for piece in pieces]).sum(0))
    if not lookups:
        return _in_one(linear)
    indices = torch.cat([piece.indices for piece in lookups], dim=1)
    looked_up = EmbeddingWeight(indices, torch.cat([piece.g for piece in lookups], dim=1), lookups[0].size, None)
    return TiedWeight(_in_one(linear), looked_up) if linear else looked_up


def _in_one(calls: Sequence[LinearWeight]) -> LinearWeight:
    """Several calls are one call over all their places."""
    if len(calls) == 1:
        return calls[0]
    return LinearWeight(torch.cat([call.a for call in calls], dim=1), torch.cat([call.g for call in calls], dim=1))


@dataclass(frozen=True)
class TiedWeight:
    """An embedding's weight that is an output layer's as well.

    Of each example, the rows that it looks up are formed for both uses together, and the output layer's other rows
    are left as factors. No number belongs to both, so nothing of one example cancels between them.
    """

    linear: LinearWeight
    lookups: EmbeddingWeight

    def measure(self) -> tuple[Tensor, Kept]:
        a, g, indices = self.linear.a, self.linear.g, self.lookups.indices
        columns = indices[:, None, :].expand(-1, g.shape[1], -1)
        by_output = g.gather(2, columns).double().transpose(1, 2) @ a.double()
        of_lookups, rows = self.lookups.measure_with(by_output)
        of_others, others = LinearWeight(a, g.scatter(2, columns, 0.0)).measure()
        return of_lookups + of_others, TiedRows(rows, others)

    def dense(self) -> Tensor:
        return self.linear.dense() + self.lookups.dense()


@dataclass(frozen=True)
class TiedRows:
    """What a tied weight keeps: the rows that examples look up, and the factors of all others."""

    rows_of: EmbeddingRows
    others: Kept

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.rows_of.total(weights) + self.others.weighted_sum(weights)
        return total.to(self.rows_of.dtype) if room_for_one_more(len(weights), self.rows_of.dtype) else total

    def rows(self, some: slice) -> TiedRows:
        return TiedRows(self.rows_of.rows(some), self.others.rows(some))

    def only(self, finite: Tensor) -> TiedRows:
        return TiedRows(self.rows_of.only(finite), self.others.only(finite))
