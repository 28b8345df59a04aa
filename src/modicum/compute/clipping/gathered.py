"""Small gradients of many parameters, measured and added up at once: launches take a GPU longer than they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from modicum.compute.clipping.pieces import Dense, Kept, LinearWeight, Piece
from modicum.compute.clipping.sums import square_norms, weighted_rows

SMALL = 1 << 13
"""Numbers of an example's gradient of one parameter, at most."""


def waiting(piece: Piece) -> Dense | None:
    """A parameter's gradients, if they are better measured together with others of their shape."""
    if isinstance(piece, LinearWeight) and on_gpu(piece.inputs) and piece.size <= SMALL and piece.is_formed:
        piece = Dense(piece.dense())
    small = type(piece) is Dense and on_gpu(piece.gradients) and prod(piece.gradients.shape[1:]) <= SMALL
    return piece if isinstance(piece, Dense) and small else None


def on_gpu(t: Tensor) -> bool:
    """Where launches count."""
    return t.is_cuda


@dataclass(frozen=True)
class Group:
    """Gradients of several parameters of one shape."""

    names: tuple[str, ...]
    rows: Tensor  # (parameters, examples, numbers)
    shape: torch.Size

    def squares(self) -> dict[str, Tensor]:
        """(B,) squared norms in float64, by parameter."""
        found = square_norms(self.rows.flatten(0, 1)).view(self.rows.shape[:2])
        return dict(zip(self.names, found.unbind(), strict=True))

    def weighted_sums(self, weights: Tensor, finite: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i · gradient_i by parameter, for (parameters, B) weights; zeros in place of examples that
        are not finite."""
        rows = torch.where(finite[:, None], self.rows, 0)
        sums = weighted_rows(weights, [rows]).view(len(self.names), *self.shape)
        return dict(zip(self.names, sums.unbind(), strict=True))


def grouped(waiting: Mapping[str, Dense]) -> tuple[list[Group], dict[str, tuple[Tensor, Kept]]]:
    """Those that have company by shape, and the others, measured by themselves."""
    alike: dict[tuple[torch.Size, torch.dtype], dict[str, Tensor]] = {}
    for name, piece in waiting.items():
        alike.setdefault((piece.gradients.shape, piece.gradients.dtype), {})[name] = piece.gradients
    groups, alone = [], {}
    for (shape, _), found in alike.items():
        if len(found) == 1:
            alone.update({name: Dense(gradients).measure() for name, gradients in found.items()})
        else:
            groups.append(Group(tuple(found), torch.stack([g.flatten(1) for g in found.values()]), shape[1:]))
    return groups, alone
