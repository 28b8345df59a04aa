"""Views of an image that are the same in every round: mirrored or not, and moved by two pixels."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

SHIFT = 2  # pixels
MOVES = ((0, 0), (-SHIFT, 0), (SHIFT, 0), (0, -SHIFT), (0, SHIFT))  # down and right
VIEWS = tuple((mirrored, *move) for move in MOVES for mirrored in (False, True))


def seen(x: Tensor, mirrored: bool, down: int, right: int) -> Tensor:
    """Images of a batch as one view shows them."""
    x = x.flip(-1) if mirrored else x
    if not (down or right):
        return x
    height, width = x.shape[-2:]
    wide = functional.pad(x, (SHIFT,) * 4, mode="replicate")
    return wide[..., SHIFT - down : SHIFT - down + height, SHIFT - right : SHIFT - right + width]
