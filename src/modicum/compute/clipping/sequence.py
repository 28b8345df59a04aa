"""Per-example gradients of linear layers over sequences on a GPU, measured and summed without being written."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from modicum.compute.clipping.rounding import PRODUCTS, product_rounding
from modicum.compute.clipping.sums import SHORT, adds_up, as_released, longest_run

NARROWEST, SHORTEST = 64, 16
"""Outputs, inputs and places from which on tiles are worth forming; smaller gradients are kept."""


WIDEST = 4096
"""Features of a layer norm that one program holds."""


def has_kernels(t: Tensor) -> bool:
    """Whether this device runs them."""
    return t.is_cuda and find_spec("triton") is not None


def takes_bf16(gradient: Tensor) -> bool:
    """Whether the numbers of a linear layer's call in bf16 are multiplied as they are, which is exact."""
    return gradient.dim() > 2 and gradient.dtype == torch.bfloat16 and has_kernels(gradient)


def takes(a: Tensor, g: Tensor) -> bool:
    """Whether (B, T, d) inputs and (B, T, p) output gradients go this way: a matter of shapes and switches."""
    if not has_kernels(a) or min(a.shape[2], g.shape[2]) < NARROWEST or a.shape[1] < SHORTEST:
        return False
    exact = a.dtype == g.dtype == torch.bfloat16
    return (exact or product_rounding(a.device, a.dtype, PRODUCTS) > 0) and longest_run(
        len(a), torch.float32
    ) >= SHORT


@torch.library.custom_op("modicum::sequence_turned", mutates_args=())
def _turned(values: Tensor) -> Tensor:
    from modicum.compute.clipping import sequence_kernels

    return sequence_kernels.turned(values).transpose(1, 2)


@_turned.register_fake
def _(values: Tensor) -> Tensor:
    batch, places, width = values.shape
    return values.new_empty(batch, width, places)


@torch.library.custom_op("modicum::sequence_square_norms", mutates_args=())
def _square_norms(a: Tensor, g: Tensor) -> Tensor:
    from modicum.compute.clipping import sequence_kernels

    return sequence_kernels.square_norms(a, g)


@_square_norms.register_fake
def _(a: Tensor, _g: Tensor) -> Tensor:
    return a.new_empty(len(a), dtype=torch.float64)


@torch.library.custom_op("modicum::sequence_weighted_sum", mutates_args=())
def _weighted_sum(a: Tensor, g: Tensor, weights: Tensor) -> Tensor:
    from modicum.compute.clipping import sequence_kernels

    batch = len(a)
    run = sequence_kernels.run_length(a, g, longest_run(batch, torch.float32))
    totals = sequence_kernels.weighted_runs(a, g, weights.float(), run)
    kind = torch.float32 if adds_up(batch, run, torch.float32) else torch.float64
    total = totals[0] if len(totals) == 1 else totals.sum(0, dtype=kind)
    return as_released(total, batch, torch.float32)


@_weighted_sum.register_fake
def _(a: Tensor, g: Tensor, _weights: Tensor) -> Tensor:
    return as_released(a.new_empty(g.shape[2], a.shape[2], dtype=torch.float32), len(a), torch.float32)


@torch.library.custom_op("modicum::norm_gradients", mutates_args=())
def _norm_gradients(a: Tensor, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from modicum.compute.clipping import sequence_kernels

    of_weight, of_bias = sequence_kernels.norm_gradients(a, g, eps)
    return of_weight, of_bias.clone()  # an operator's answers share no memory


@_norm_gradients.register_fake
def _(a: Tensor, _g: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
    return a.new_empty(len(a), a.shape[2]), a.new_empty(len(a), a.shape[2])


def norm_gradients(a: Tensor, g: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """(B, d) gradients of a layer norm's weight and bias by a kernel that reads everything once; None where it
    does not apply."""
    if not has_kernels(a) or a.dim() != 3 or a.dtype != torch.float32 or a.shape[2] > WIDEST:
        return None
    found: tuple[Tensor, Tensor] = _norm_gradients(a, g, eps)
    return found


@dataclass(frozen=True)
class Formed:
    """A layer's gradients as their factors, from which the same tiles are formed again."""

    a: Tensor
    g: Tensor

    def weighted_sum(self, weights: Tensor) -> Tensor:
        found: Tensor = _weighted_sum(self.a, self.g, weights)
        return found

    def rows(self, some: slice) -> Formed:
        return Formed(self.a[some], self.g[some])

    def only(self, finite: Tensor) -> Formed:
        return self  # the others have weight 0, and the kernel adds nothing for them


def measured(a: Tensor, g: Tensor) -> tuple[Tensor, Formed]:
    """(B,) squared norms of Σ_t δ_t a_tᵀ in float64, never less than of what is then summed; and what to keep."""
    if g.dtype != torch.bfloat16:
        g = _turned(g).transpose(1, 2)  # as the kernels want it, once for both
    squares: Tensor = _square_norms(a, g)
    # Squares that vanish in float32 are less than this each.
    return squares + (a.shape[2] * g.shape[2] + 1) * torch.finfo(torch.float32).tiny, Formed(a, g)
