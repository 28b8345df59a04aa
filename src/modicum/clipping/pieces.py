"""What one layer's call contributes to per-example gradients, kept as its factors instead of multiplied out.

A piece answers two questions: the squared norm of each example's gradient, and the weighted sum of the gradients.
Where it pays, both are answered without a gradient per example ever existing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

KEEP = 1 << 24
"""At most this many numbers of per-example gradients exist at a time for one parameter."""

WRITE = 120
"""What writing and twice reading one number costs, in multiply-adds."""

SLACK = 8
"""Rounding allowance of the Gram route, in units of the last place of Σ|terms|."""


class Piece(Protocol):
    """One parameter's gradient through one call of its layer."""

    def square_norms(self) -> Tensor:
        """(B,) squared norms."""

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i · gradient_i, in the parameter's shape."""

    def dense(self) -> Tensor:
        """(B, *shape) gradients, multiplied out."""


@dataclass(frozen=True)
class Dense:
    """Gradients that exist for each example: small ones, and sums over the calls of a shared layer."""

    gradients: Tensor

    def square_norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.gradients.flatten(1), dim=1).square()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        flat = self.gradients.flatten(1)
        return (weights @ flat).view(self.gradients.shape[1:])

    def dense(self) -> Tensor:
        return self.gradients


class LinearWeight:
    """g_i = Σ_t δ_it a_itᵀ for inputs a (B, T, d) and output gradients δ (B, T, p)."""

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        self.a = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
        self.g = outputs.reshape(outputs.shape[0], -1, outputs.shape[-1])
        self.kept: Tensor | None = None

    def square_norms(self) -> Tensor:
        batch, places, d = self.a.shape
        p = self.g.shape[2]
        if places == 1:
            return self.a.square().sum((1, 2)) * self.g.square().sum((1, 2))
        products = places * d * p
        if 2 * places**2 * (d + p) + products < 1.3 * products + WRITE * d * p:
            return gram_square_norms(self.a @ self.a.transpose(1, 2), self.g @ self.g.transpose(1, 2))
        step = max(1, KEEP // (d * p))
        if step >= batch:
            self.kept = self.dense()
            return Dense(self.kept).square_norms()
        parts = zip(torch.split(self.g, step), torch.split(self.a, step), strict=True)
        return torch.cat([(g.transpose(1, 2) @ a).square().sum((1, 2)) for g, a in parts])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.kept is not None:
            return Dense(self.kept).weighted_sum(weights)
        weighted = self.g * weights[:, None, None]
        return weighted.flatten(0, 1).t() @ self.a.flatten(0, 1)

    def dense(self) -> Tensor:
        return self.g.transpose(1, 2) @ self.a


class EmbeddingWeight:
    """g_i adds δ_it to row index_it, for output gradients δ (B, T, d)."""

    def __init__(self, indices: Tensor, outputs: Tensor, rows: int, padding: int | None) -> None:
        self.indices = indices.reshape(indices.shape[0], -1)
        g = outputs.reshape(*self.indices.shape, outputs.shape[-1])
        self.g = g if padding is None else g.masked_fill((self.indices == padding)[:, :, None], 0.0)
        self.rows = rows

    def square_norms(self) -> Tensor:
        if self.indices.shape[1] == 1:
            return self.g.square().sum((1, 2))
        same = (self.indices[:, :, None] == self.indices[:, None, :]).to(self.g.dtype)
        # Each place holds its whole row's gradient, so a row that occurs n times is counted n times.
        return ((same @ self.g).square().sum(2) / same.sum(2)).sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self.g.new_zeros(self.rows, self.g.shape[2])
        return total.index_add_(0, self.indices.flatten(), (self.g * weights[:, None, None]).flatten(0, 1))

    def dense(self) -> Tensor:
        total = self.g.new_zeros(self.g.shape[0], self.rows, self.g.shape[2])
        return total.scatter_add_(1, self.indices[:, :, None].expand_as(self.g), self.g)


def gram_square_norms(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Σ_ts (a_t·a_s)(δ_t·δ_s) from the two (B, T, T) Gram matrices.

    The terms may cancel, and then rounding is large beside what is left. The bound Σ|terms| ≤ (Σ_t ‖a_t‖‖δ_t‖)²
    says how large, and it is added: a norm may be overestimated, never underestimated.
    """
    terms = (inputs * outputs).sum((1, 2))
    diagonals = inputs.diagonal(dim1=1, dim2=2) * outputs.diagonal(dim1=1, dim2=2)
    largest = diagonals.clamp(min=0.0).sqrt().sum(1).square()
    return terms.clamp(min=0.0) + SLACK * torch.finfo(terms.dtype).eps * largest
