"""What one layer's call contributes to per-example gradients, kept as its factors instead of multiplied out.

A piece is measured first, which gives each example's squared norm and whatever is smallest to keep until the
weights are known; then it is summed. Where it pays, no gradient per example ever exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from modicum.compute.clipping import sequence
from modicum.compute.clipping.sums import (
    as_released,
    factor_charge,
    in_range,
    keep_rows_,
    only_rows,
    square_lengths,
    square_norms,
    weighted_outer,
    weighted_products,
    weighted_rows,
)

KEEP, GPU_KEEP = 1 << 19, 1 << 15
"""Up to this many numbers of an example's gradient are kept for one parameter, if that is fastest. GPUs are given
larger batches."""

LARGER = 3
"""Beyond that, they are kept where they take at most so many times the memory of their factors."""

WRITE = 120
"""What writing and twice reading one number costs, in multiply-adds."""


class Kept(Protocol):
    """What is kept of a parameter's per-example gradients until their weights are known."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · gradient_i, in the parameter's shape."""

    def rows(self, some: slice) -> Kept:
        """The same for some of the examples."""

    def only(self, finite: Tensor) -> Kept:
        """The same with zeros in place of the other examples, whatever they hold."""


class Piece(Protocol):
    """One parameter's per-example gradients through one call of its layer."""

    def measure(self) -> tuple[Tensor, Kept]:
        """(B,) squared norms in float64, never less than of what is then summed; and what to keep."""

    def dense(self) -> Tensor:
        """(B, *shape) gradients, multiplied out."""


@dataclass(frozen=True)
class Dense:
    """Gradients that exist for each example: small ones, and sums over the calls of a shared layer."""

    gradients: Tensor

    def measure(self) -> tuple[Tensor, Kept]:
        return square_norms(self.gradients.flatten(1)), self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weighted_rows(weights, [self.gradients.flatten(1)]).view(self.gradients.shape[1:])

    def rows(self, some: slice) -> Dense:
        return Dense(self.gradients[some])

    def only(self, finite: Tensor) -> Dense:
        return Dense(keep_rows_(self.gradients, finite))

    def dense(self) -> Tensor:
        return self.gradients


@dataclass(frozen=True)
class Sliced:
    """The same in slices of the batch, left where they were computed: joining them would touch fresh memory."""

    slices: tuple[Tensor, ...]

    def measure(self) -> tuple[Tensor, Kept]:
        return torch.cat([Dense(part).measure()[0] for part in self.slices]), self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weighted_rows(weights, [part.flatten(1) for part in self.slices]).view(self.slices[0].shape[1:])

    def rows(self, some: slice) -> Dense:
        return Dense(self.dense()[some])

    def only(self, finite: Tensor) -> Sliced:
        parts = zip(self.slices, torch.split(finite, len(self.slices[0])), strict=True)
        return Sliced(tuple(keep_rows_(part, fine) for part, fine in parts))

    def dense(self) -> Tensor:
        return torch.cat(self.slices)


class LinearWeight:
    """g_i = Σ_t δ_it a_itᵀ for inputs a (B, T, d) and output gradients δ (B, T, p)."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.lengths: tuple[Tensor, Tensor] | None = None  # where T is 1, once measured

    @cached_property
    def a(self) -> Tensor:
        """(B, T, d) inputs."""
        return self.inputs.reshape(self.inputs.shape[0], -1, self.inputs.shape[-1])

    @cached_property
    def g(self) -> Tensor:
        """(B, T, p) output gradients."""
        return self.outputs.reshape(self.outputs.shape[0], -1, self.outputs.shape[-1])

    @cached_property
    def one_place(self) -> tuple[Tensor, Tensor] | None:
        """(B, d) and (B, p), where T is 1."""
        if self.inputs.dim() == self.outputs.dim() == 2:
            return self.inputs, self.outputs
        return (self.a[:, 0], self.g[:, 0]) if self.a.shape[1] == 1 else None

    def measure(self) -> tuple[Tensor, Kept]:
        if self.one_place is not None:
            self.lengths = of_inputs, of_outputs = square_lengths(*self.one_place)
            return of_inputs * of_outputs, self
        if sequence.takes(self.a, self.g):
            return sequence.measured(self.a, self.g)
        return Dense(self.dense()).measure() if self.is_formed else (self.measure_factors(), self)

    @property
    def size(self) -> int:
        """Numbers of one example's gradient."""
        return self.inputs.shape[-1] * self.outputs.shape[-1]

    @property
    def is_formed(self) -> bool:
        """Whether each example's gradient is written: a matter of shapes."""
        if self.one_place is not None or sequence.takes(self.a, self.g):
            return False
        places, d = self.a.shape[1:]
        p = self.g.shape[2]
        products = places * d * p
        by_gram = 4 * places**2 * (d + p) + 1.5 * products < 1.3 * products + WRITE * d * p
        return not by_gram and not too_large(d * p, places * (d + p), on_gpu=self.a.is_cuda)

    def measure_factors(self) -> Tensor:
        """Squared norms by the Gram route, for factors that are kept."""
        by_input, by_output = (t @ t.transpose(1, 2) for t in (self.a.double(), self.g.double()))
        added = self.a.shape[2] + self.g.shape[2]
        return gram_square_norms(by_input, by_output, added, self.g.dtype)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.one_place is not None:
            inputs, outputs = self.one_place
            return weighted_outer(weights, outputs, inputs)
        a, g = (t.transpose(1, 2)[:, None] for t in (self.a, self.g))
        return weighted_products(weights, g, lambda some, units: a[some, :, units], a.shape[2], 1)[0]

    def rows(self, some: slice) -> LinearWeight:
        return LinearWeight(self.inputs[some], self.outputs[some])

    def only(self, finite: Tensor) -> LinearWeight:
        return LinearWeight(only_rows(self.inputs, finite), only_rows(self.outputs, finite))

    def dense(self) -> Tensor:
        return self.g.transpose(1, 2) @ self.a


@dataclass(frozen=True)
class RowBias(Dense):
    """The gradients of a linear layer's bias, where there is one place: its output gradients, measured with the
    weight's unless that is frozen."""

    weight: LinearWeight

    def measure(self) -> tuple[Tensor, Kept]:
        if self.weight.lengths is None:
            self.weight.measure()
        assert self.weight.lengths is not None
        return self.weight.lengths[1], self

    def only(self, finite: Tensor) -> Dense:
        return Dense(only_rows(self.gradients, finite))  # the weight reads them too


class EmbeddingWeight:
    """g_i adds δ_it to row index_it, for output gradients δ (B, T, d)."""

    def __init__(self, indices: Tensor, outputs: Tensor, size: int, padding: int | None) -> None:
        self.indices = indices.reshape(indices.shape[0], -1)
        g = outputs.reshape(*self.indices.shape, outputs.shape[-1])
        self.g = g if padding is None else g.masked_fill((self.indices == padding)[:, :, None], 0.0)
        self.size = size

    def measure(self) -> tuple[Tensor, Kept]:
        return self.measure_with(None)

    def measure_with(self, more: Tensor | None) -> tuple[Tensor, EmbeddingRows]:
        """`more` is what else the rows that are looked up are given, (B, T, d) in float64."""
        same = self.indices[:, :, None] == self.indices[:, None, :]
        first = ~same.tril(-1).any(2)
        sums = _where_first(same, first, self.g.double())
        if more is not None:
            sums += torch.where(first[:, :, None], more, 0)
        rows = EmbeddingRows(self.indices, first, sums, self.size, self.g.dtype)
        return sums.square().sum((1, 2)), rows

    def dense(self) -> Tensor:
        total = self.g.new_zeros(self.g.shape[0], self.size, self.g.shape[2])
        return total.scatter_add_(1, self.indices[:, :, None].expand_as(self.g), self.g)


def _where_first(same: Tensor, first: Tensor, numbers: Tensor) -> Tensor:
    """(B, T, d) numbers of alike places added up where the `first` of them stands, and zeros elsewhere."""
    if numbers.is_cuda:  # whose threads would add in whatever order they come
        return torch.where(first[:, :, None], same.double() @ numbers, 0)
    starts = torch.arange(0, first.numel(), max(1, first.shape[1]))
    there = same.byte().argmax(2) + starts[:, None]  # the first of several that are largest
    return (
        torch.zeros_like(numbers)
        .flatten(0, 1)
        .index_add_(0, there.flatten(), numbers.flatten(0, 1))
        .view_as(numbers)
    )


@dataclass(frozen=True)
class EmbeddingRows:
    """Each example's gradients by row of an embedding, in float64.

    Where an example looks a row up first stands all that it gives to it, elsewhere zeros: none of its terms cancel
    when they are added to everybody else's.
    """

    indices: Tensor
    first: Tensor  # (B, T), whether it is looked up there first
    sums: Tensor
    size: int
    dtype: torch.dtype

    def total(self, weights: Tensor) -> Tensor:
        """The weighted sum in float64, example after example."""
        weighted = (self.sums * weights.double()[:, None, None]).flatten(0, 1)
        if not weighted.is_cuda:
            return weighted.new_zeros(self.size, weighted.shape[1]).index_add_(0, self.indices.flatten(), weighted)
        # There threads would add in whatever order they come. This sorts rows first and adds each one's terms in
        # their order; zeros get rows of their own behind the others, or thousands of them would stand in line.
        behind = self.size + torch.arange(len(weighted), device=weighted.device)
        rows = torch.where(self.first.flatten(), self.indices.flatten(), behind)
        total = weighted.new_zeros(self.size + len(weighted), weighted.shape[1])
        return total.index_put_((rows,), weighted, accumulate=True)[: self.size]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return as_released(self.total(weights), len(weights), self.dtype)

    def rows(self, some: slice) -> EmbeddingRows:
        return EmbeddingRows(self.indices[some], self.first[some], self.sums[some], self.size, self.dtype)

    def only(self, finite: Tensor) -> EmbeddingRows:
        return EmbeddingRows(self.indices, self.first, only_rows(self.sums, finite), self.size, self.dtype)


def too_large(gradient: int, factors: int, *, on_gpu: bool) -> bool:
    """Whether gradients of so many numbers an example are better left as their factors, whatever that takes."""
    return gradient > (GPU_KEEP if on_gpu else KEEP) and gradient > LARGER * factors


def gram_square_norms(
    inputs: Tensor, outputs: Tensor, added: int, dtype: torch.dtype, charge: float | None = None
) -> Tensor:
    """Σ_ts (a_t·a_s)(δ_t·δ_s) from the two (n, T, T) Gram matrices in float64, each entry of `added` products.

    The terms may cancel, and then rounding is large beside what is left. Σ|terms| ≤ s², s = Σ_t ‖a_t‖‖δ_t‖, says
    how large; and in the weighted sum of a model in this precision terms are rounded as well, by `charge` of s
    (None: what `weighted_products` needs). Both are added, so that a norm may be overestimated, never
    underestimated.
    """
    places = inputs.shape[1]
    squares, square_outputs = (
        in_range(t.diagonal(dim1=1, dim2=2).clamp(min=0.0), dtype) for t in (inputs, outputs)
    )
    spread = (squares * square_outputs).sqrt().sum(1)
    terms = (inputs * outputs).sum((1, 2)).clamp(min=0.0)
    rounding = (added + places**2) * torch.finfo(inputs.dtype).eps
    if charge is None:
        charge = factor_charge(places, dtype, joint=inputs.is_cuda)
    return ((terms + rounding * spread.square()).sqrt() + charge * spread).square()
