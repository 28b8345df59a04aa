"""Products inside a model that no linear layer makes, computed alike for every example.

Matrix libraries add up in an order that depends on where a matrix begins in memory. In a batch of matrices of
uneven sizes, such as attention's, every second or fourth one begins elsewhere, and a record more moves all that
follow it. So each matrix begins a line of the cache while a model runs, forth and back. The same holds of the
gradients that `torch.vmap` forms example by example, and of the rows of examples that are multiplied with a small
matrix (`even_linear` has those of layers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from modicum.compute.apart import each_product
from modicum.compute.even_linear import LINE, filled, uneven_sizes
from modicum.compute.searched import SEARCHED, UNEVEN

BATCHED = ("bmm", "scaled_dot_product", UNEVEN, "unknown")
"""What the names of operations have in common whose numbers depend on where an example's matrix or row begins."""


@lru_cache(maxsize=64)
def multiplies(operations: frozenset[str]) -> bool:
    """Whether a model of these operations multiplies examples' matrices, or may do so."""
    return any(name in operation for operation in operations for name in BATCHED)


class EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that no compiler ever meets."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not asked for: torch would import its compiler at the first operation, two seconds of every process."""
        return False


class _EvenProducts(EagerMode):  # type: ignore[no-untyped-call]
    """Stands in for torch's products of batches of matrices."""

    def __init__(self, *, searched_alone: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.searched_alone = searched_alone

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.searched_alone and func.overloadpacket.__name__ not in SEARCHED:
            raise RuntimeError(f"{func.overloadpacket.__name__}, which was not searched")
        if func is torch.ops.aten.bmm.default:
            return even_bmm(*args)
        if func is torch.ops.aten.baddbmm.default:
            scales = kwargs or {}
            return scales.get("beta", 1) * args[0] + scales.get("alpha", 1) * even_bmm(*args[1:])
        if func is torch.ops.aten.mm.default and uneven_rows(*args):
            return even_mm(*args)
        if func is torch.ops.aten.addmm.default and uneven_rows(*args[1:]):
            scales = kwargs or {}
            return scales.get("beta", 1) * args[0] + scales.get("alpha", 1) * even_mm(*args[1:])
        if func is torch.ops.aten.mv.default:
            return even_mm(args[0], args[1][:, None])[:, 0]
        if func is torch.ops.aten.convolution_backward.default and _is_uneven(*args):
            raise RuntimeError("gradients of 1×1 convolutions, which libraries add up in several orders")
        return func(*args, **(kwargs or {}))


def even_bmm(left: Tensor, right: Tensor) -> Tensor:
    """left_i right_i for (b, p, T) and (b, T, n); bits depend neither on i nor on the row."""
    size, out = right.shape[1:]
    if uneven_sizes(size, out):
        left, right = _in_lines(left, right)
    return each_product(left, right.transpose(1, 2))[..., :out].contiguous()


def uneven_rows(left: Tensor, right: Tensor) -> bool:
    """Whether rows of (r, k) may be multiplied with (k, n) in several orders: if they begin at odd addresses."""
    size, out = right.shape
    return uneven_sizes(size, out, left.stride(0) if left.stride(1) == 1 else 0)


def even_mm(left: Tensor, right: Tensor) -> Tensor:
    """left right for (r, k) and (k, n), filled up with zeros to whole lines; bits do not depend on the row."""
    out = right.shape[1]
    left, right = _in_lines(left, right)
    return (left.contiguous() @ right)[:, :out].contiguous()


def _in_lines(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both filled up with zeros, which change no number's value."""
    size, out = right.shape[-2:]
    return filled(left, -size % LINE), filled(right, -out % LINE, -size % LINE)


def _is_uneven(_g: Tensor, _a: Tensor, weight: Tensor, *rest: Any) -> bool:
    """A 1×1 convolution of several groups, one or more an example, whose weights' gradients are asked for."""
    *_, groups, wanted = rest
    return groups > 1 and wanted[1] and math.prod(weight.shape[2:]) == 1


@contextmanager
def even_products(*, searched_alone: bool = False) -> Iterator[None]:
    """Products of examples' matrices are even inside, and attention consists of them. For work on a CPU.

    `searched_alone`: an operation that was not searched is a RuntimeError."""
    with sdpa_kernel(SDPBackend.MATH), _EvenProducts(searched_alone=searched_alone):
        yield
