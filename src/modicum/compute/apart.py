"""Examples' matrices at places of their own, and products of them that do not depend on which example it is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

ALIGNED = 16
"""Numbers that fill a line of the cache, the widest alignment that a library is known to look at."""


def apart(matrices: Tensor) -> Tensor:
    """The same (…, n, T) matrices, one or more an example, each at an address on a CPU that is like any other's.

    Libraries add up in another order where memory is aligned otherwise; one example less would move the others.
    """
    size = matrices.shape[-2] * matrices.shape[-1]
    dense = matrices.is_contiguous() or matrices.transpose(-1, -2).is_contiguous()
    if matrices.is_cuda or (size % ALIGNED == 0 and dense):
        return matrices
    return _room(matrices, matrices.shape).copy_(matrices)


def _room(like: Tensor, shape: torch.Size) -> Tensor:
    """Empty matrices, each of which begins a line of the cache."""
    size = shape[-2] * shape[-1]
    lines = like.new_empty(*shape[:-2], -(-size // ALIGNED) * ALIGNED)
    return lines[..., :size].view(shape)


def each_product(left: Tensor, right: Tensor) -> Tensor:
    """left_i right_iᵀ for (b, p, T) and (b, n, T), as precise as the device likes; bits do not depend on i."""
    if isinstance(left, FakeTensor) and not left.is_cuda:
        found: Tensor = products_let_be(left, right)
        return found
    left, right = apart(left), apart(right).transpose(1, 2)
    shape = torch.Size((len(left), left.shape[1], right.shape[2]))
    if left.is_cuda or shape[1] * shape[2] % ALIGNED == 0:
        return left @ right
    return torch.bmm(left, right, out=_room(left, shape))


@torch.library.custom_op("modicum::each_product", mutates_args=())
def products_let_be(left: Tensor, right: Tensor) -> Tensor:
    """`each_product` for a compiler that traces it: an operator, so that matrices stay where they are put."""
    return each_product(left, right).contiguous()


@products_let_be.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(len(left), left.shape[1], right.shape[1])
