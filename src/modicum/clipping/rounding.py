"""Products that a device rounds more coarsely than float32 (tf32, bf16), and bounds that hold all the same.

An example's norm and its share of the weighted sum are two computations over the same inputs a and output
gradients δ. In float32 they agree to a few units in the last place. With tf32 each factor of a product is first
cut to ten bits, and not alike in both, since the weights are multiplied in before the second. Where terms cancel,
what is left can differ by far more than ten bits. Each of the two is off by at most 2u·Σ_t ‖a_t‖‖δ_t‖, where u is
the rounding of one factor, and by that much the norm is taken to be larger. Where the gradients themselves are
kept, only the weighted sum rounds, by 2u of the norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

TF32, BF16 = 2.0**-10, 2.0**-7
"""Relative error of a factor whose further bits are cut off."""

FULL = ("ieee", "none", False)


@runtime_checkable
class Factored(Protocol):
    """Per-example gradients that are kept as the factors of a product."""

    def spread(self) -> Tensor:
        """(B,) Σ_t ‖a_t‖‖δ_t‖, or more; found without products that the device may round."""


def product_rounding(device: torch.device, dtype: torch.dtype) -> float:
    """How coarsely the device is allowed to round the factors of float32 products; 0 where it is not."""
    if dtype != torch.float32:
        return 0.0
    allowed = [getattr(place, name) for place, name in _switches(device)]
    return BF16 if "bf16" in allowed else TF32 if "tf32" in allowed or True in allowed else 0.0


def _switches(device: torch.device) -> list[tuple[Any, str]]:
    """Where torch keeps what it allows for products and convolutions; before torch 2.9, tf32 on CUDA alone."""
    backends: Any = torch.backends
    on_cuda = device.type == "cuda"
    if hasattr(backends.cudnn, "conv"):
        both = (
            (backends.cuda.matmul, backends.cudnn.conv)
            if on_cuda
            else (backends.mkldnn.matmul, backends.mkldnn.conv)
        )
        return [(place, "fp32_precision") for place in both]
    return [(backends.cuda.matmul, "allow_tf32"), (backends.cudnn, "allow_tf32")] if on_cuda else []


def safe_squares(squares: Tensor, kept: object) -> Tensor:
    """Squared norms, made so much larger that the weighted sum of what is kept cannot exceed its bounds."""
    u = product_rounding(squares.device, squares.dtype)
    if u == 0:
        return squares
    norms = squares.sqrt()
    kept = getattr(kept, "kept", kept)  # a view of another shape
    off = 4 * u * kept.spread() if isinstance(kept, Factored) else 2 * u * (1 + u) * norms
    return (norms + off).square()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in float32 itself."""
    before = [(place, name, getattr(place, name)) for place, name in _switches(device)]
    for place, name, value in before:
        if value not in FULL:
            setattr(place, name, "ieee" if isinstance(value, str) else False)
    try:
        yield
    finally:
        for place, name, value in before:
            if value not in FULL:
                setattr(place, name, value)


@torch.library.custom_op("modicum::exact_product", mutates_args=())
def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    with full_precision(a.device):
        return a @ b


@_exact_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 itself; an operator of its own where the device rounds, since compilers see no switches."""
    if product_rounding(a.device, a.dtype) == 0:
        return a @ b
    found: Tensor = _exact_product(a, b)
    return found
