"""What one layer's call contributes to per-example gradients, kept as its factors instead of multiplied out.

A piece is measured first, which gives each example's squared norm and whatever is smallest to keep until the
weights are known; then it is summed. Where it pays, no gradient per example ever exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modicum.clipping.rounding import exact_product

KEEP = 1 << 24
"""At most this many numbers of per-example gradients exist at a time for one parameter."""

WRITE = 120
"""What writing and twice reading one number costs, in multiply-adds."""

SLACK = 8
"""Rounding allowance of the Gram route, in units of the last place of Σ|terms|."""


class Kept(Protocol):
    """What is kept of a parameter's per-example gradients until their weights are known."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · gradient_i, in the parameter's shape."""

    def rows(self, index: Tensor) -> Kept:
        """The same for some of the examples."""


class Piece(Protocol):
    """One parameter's per-example gradients through one call of its layer."""

    def measure(self) -> tuple[Tensor, Kept]:
        """(B,) squared norms, and what to keep."""

    def dense(self) -> Tensor:
        """(B, *shape) gradients, multiplied out."""


@dataclass(frozen=True)
class Dense:
    """Gradients that exist for each example: small ones, and sums over the calls of a shared layer."""

    gradients: Tensor

    def measure(self) -> tuple[Tensor, Kept]:
        return torch.linalg.vector_norm(self.gradients.flatten(1), dim=1).square(), self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = self.gradients.flatten(1)
        return (weights @ flat).view(self.gradients.shape[1:])

    def rows(self, index: Tensor) -> Dense:
        return Dense(self.gradients[index])

    def dense(self) -> Tensor:
        return self.gradients


@dataclass(frozen=True)
class Sliced:
    """The same in slices of the batch, left where they were computed: joining them would touch fresh memory."""

    slices: tuple[Tensor, ...]

    def measure(self) -> tuple[Tensor, Kept]:
        return torch.cat([Dense(part).measure()[0] for part in self.slices]), self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total: Tensor | None = None
        for part, its_weights in zip(
            self.slices, torch.split(weights, [len(p) for p in self.slices]), strict=True
        ):
            one = Dense(part).weighted_sum(its_weights)
            total = one if total is None else total.add_(one)
        assert total is not None
        return total

    def rows(self, index: Tensor) -> Dense:
        return Dense(self.dense()[index])

    def dense(self) -> Tensor:
        return torch.cat(self.slices)


class LinearWeight:
    """g_i = Σ_t δ_it a_itᵀ for inputs a (B, T, d) and output gradients δ (B, T, p)."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        self.a = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
        self.g = outputs.reshape(outputs.shape[0], -1, outputs.shape[-1])

    def measure(self) -> tuple[Tensor, Kept]:
        batch, places, d = self.a.shape
        p = self.g.shape[2]
        if places == 1:
            return _square_lengths(self.a) * _square_lengths(self.g), self
        products = places * d * p
        if 2 * places**2 * (d + p) + products < 1.3 * products + WRITE * d * p:
            by_input, by_output = (exact_product(t, t.transpose(1, 2)) for t in (self.a, self.g))
            return gram_square_norms(by_input, by_output, d, p), self
        step = max(1, KEEP // (d * p))
        if step >= batch:
            return Dense(self.dense()).measure()
        parts = zip(torch.split(self.g, step), torch.split(self.a, step), strict=True)
        return torch.cat([(g.transpose(1, 2) @ a).square().sum((1, 2)) for g, a in parts]), self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weighted = self.g * weights[:, None, None]
        return weighted.flatten(0, 1).t() @ self.a.flatten(0, 1)

    def spread(self) -> Tensor:
        return (_lengths(self.a) * _lengths(self.g)).sum(1)

    def rows(self, index: Tensor) -> LinearWeight:
        return LinearWeight(self.a[index], self.g[index])

    def dense(self) -> Tensor:
        return self.g.transpose(1, 2) @ self.a


class EmbeddingWeight:
    """g_i adds δ_it to row index_it, for output gradients δ (B, T, d)."""

    def __init__(self, indices: Tensor, outputs: Tensor, size: int, padding: int | None) -> None:
        self.indices = indices.reshape(indices.shape[0], -1)
        g = outputs.reshape(*self.indices.shape, outputs.shape[-1])
        self.g = g if padding is None else g.masked_fill((self.indices == padding)[:, :, None], 0.0)
        self.size = size

    def measure(self) -> tuple[Tensor, Kept]:
        if self.indices.shape[1] == 1:
            return self.g.square().sum((1, 2)), self
        same = (self.indices[:, :, None] == self.indices[:, None, :]).to(self.g.dtype)
        # Each place holds its whole row's gradient, so a row that occurs n times is counted n times.
        return ((same @ self.g).square().sum(2) / same.sum(2)).sum(1), self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.g.new_zeros(self.size, self.g.shape[2])
        return total.index_add_(0, self.indices.flatten(), (self.g * weights[:, None, None]).flatten(0, 1))

    def rows(self, index: Tensor) -> EmbeddingWeight:
        return EmbeddingWeight(self.indices[index], self.g[index], self.size, None)

    def dense(self) -> Tensor:
        total = self.g.new_zeros(self.g.shape[0], self.size, self.g.shape[2])
        return total.scatter_add_(1, self.indices[:, :, None].expand_as(self.g), self.g)


def _lengths(vectors: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return lengths


def _square_lengths(vectors: Tensor) -> Tensor:
    """‖v‖² of each example, or more: a square under the smallest number vanishes, so that is added for each.

    A model that somebody chose for the purpose may have inputs of 1e19 beside such output gradients, and the
    gradient of a weight is then not small at all.
    """
    lost = vectors[0].numel() * torch.finfo(vectors.dtype).tiny
    return vectors.square().sum((1, 2)) + lost


def gram_square_norms(inputs: Tensor, outputs: Tensor, added: int, added_outputs: int) -> Tensor:
    """Σ_ts (a_t·a_s)(δ_t·δ_s) from the two (B, T, T) Gram matrices, whose entries add up that many products.

    The terms may cancel, and then rounding is large beside what is left. The bound Σ|terms| ≤ (Σ_t ‖a_t‖‖δ_t‖)²
    says how large, and it is added; so is what products under the smallest number may have lost, which is little
    in each entry but may stand beside a large one. A norm may be overestimated, never underestimated.
    """
    number = torch.finfo(inputs.dtype)
    lost, lost_outputs = added * number.tiny, added_outputs * number.tiny
    squares = inputs.diagonal(dim1=1, dim2=2).clamp(min=0.0) + lost
    square_outputs = outputs.diagonal(dim1=1, dim2=2).clamp(min=0.0) + lost_outputs
    largest = (squares * square_outputs).sqrt().sum(1).square()
    vanished = lost_outputs * squares.sqrt().sum(1).square() + lost * square_outputs.sqrt().sum(1).square()
    terms = (inputs * outputs).sum((1, 2)).clamp(min=0.0)
    return terms + SLACK * number.eps * largest + vanished
