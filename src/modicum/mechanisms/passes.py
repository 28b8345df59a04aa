"""A step's clipped sum in passes of one shape: what is computed of a record does not depend on who was drawn."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from modicum.core.clips import Clip
from modicum.core.parts import Backend, Batch, Losses
from modicum.privacy.fixed_shapes import BLANK, FixedShape, Lanes


def clipped_in_passes(
    backend: Backend,
    theta: Tensor,
    records: Batch,
    rows: Tensor,
    losses: Losses,
    clip: Clip,
    shape: FixedShape | None,
) -> tuple[Tensor, Tensor]:
    """The clipped sum over the records whose numbers stand in (passes, rows), and their norms; both are private.

    In lanes one record more shifts its lane in all later passes, so roundings are counted over all rows of a step:
    at most as many as there are records. Totals of passes are added in float64, however many passes there are.

    Args:
        theta: one client's parameters.
        rows: numbers of records, `BLANK` where a row is blank; there may be no pass at all. One pass alone, of
            all rows that enter, may come without its axis.
        shape: of the passes; None where nothing was drawn.

    Returns:
        The sum in float64, and the norms before clipping of the records alone.
    """
    most = len(records) if isinstance(shape, Lanes) else None
    total, norms = theta.new_zeros(theta.shape, dtype=torch.float64), [theta.new_zeros(0)]
    for numbers in rows if rows.dim() == 2 else rows[None]:
        batch = replace(laid_out(records, numbers), part_of=most)
        sums, found = backend.clipped_sums(theta[None], [batch], losses, [clip])
        assert batch.present is not None
        total += sums[0]
        norms.append(found[0][batch.present])
    return total, torch.cat(norms)


def laid_out(records: Batch, numbers: Tensor) -> Batch:
    """One pass: these records in these rows, and blanks elsewhere. Its shapes do not depend on who is there."""
    return records.take(numbers.clamp(min=0)).blanked(numbers != BLANK)
