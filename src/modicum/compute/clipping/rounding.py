"""Products that a device rounds more coarsely than float32 (tf32, bf16), and those that it must not.

Gradients of single examples may be formed with coarse products: whatever comes out is measured, and what is
measured is added up. The adding up, with weights, is a product as well; a coarse one would make a contribution
larger than its norm says, so it is always taken in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

TF32, BF16 = 2.0**-10, 2.0**-7
"""Relative error of a factor whose further bits are cut off."""

FULL = ("ieee", "none", False)


PRODUCTS, ALL = 1, 2
"""How many switches count: those of matrix products alone, or those of convolutions as well."""


def product_rounding(device: torch.device, dtype: torch.dtype, switches: int = ALL) -> float:
    """How coarsely the device is allowed to round the factors of float32 products; 0 where it is not."""
    if dtype != torch.float32:
        return 0.0
    allowed = [getattr(place, name) for place, name in _switches(device.type)[:switches]]
    return BF16 if "bf16" in allowed else TF32 if "tf32" in allowed or True in allowed else 0.0


@cache
def _switches(device: str) -> list[tuple[Any, str]]:
    """Where torch keeps what it allows for products and convolutions; before torch 2.9, tf32 on CUDA alone."""
    backends: Any = torch.backends
    on_cuda = device == "cuda"
    if hasattr(backends.cudnn, "conv"):
        both = (
            (backends.cuda.matmul, backends.cudnn.conv)
            if on_cuda
            else (backends.mkldnn.matmul, backends.mkldnn.conv)
        )
        return [(place, "fp32_precision") for place in both]
    return [(backends.cuda.matmul, "allow_tf32"), (backends.cudnn, "allow_tf32")] if on_cuda else []


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in float32 itself."""
    before = [(place, name, getattr(place, name)) for place, name in _switches(device.type)]
    for place, name, value in before:
        if value not in FULL:
            setattr(place, name, "ieee" if isinstance(value, str) else False)
    try:
        yield
    finally:
        for place, name, value in before:
            if value not in FULL:
                setattr(place, name, value)


@torch.library.custom_op("modicum::widened", mutates_args=())
def _widened(values: Tensor, double: bool) -> Tensor:
    return values.to(torch.float64 if double else torch.float32)


@_widened.register_fake
def _(values: Tensor, double: bool) -> Tensor:
    return torch.empty_like(values, dtype=torch.float64 if double else torch.float32)


def widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in a wider precision. Of bf16 by an operator of its own: where numbers were rounded to bf16 a moment
    ago, a compiler leaves both steps out, and norms would be those of other numbers than are added up."""
    if values.dtype != torch.bfloat16:
        return values.to(dtype)
    found: Tensor = _widened(values, dtype == torch.float64)
    return found


@torch.library.custom_op("modicum::exact_product", mutates_args=())
def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    with full_precision(a.device):
        return a @ b


@_exact_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 itself; an operator of its own where the device rounds, since compilers see no switches."""
    if product_rounding(a.device, a.dtype, PRODUCTS) == 0:
        return a @ b
    found: Tensor = _exact_product(a, b)
    return found
