"""Weighted sums of per-example gradients, one for each client of a stack."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from modicum.compute.clipping.pieces import Dense, Kept, LinearWeight
from modicum.compute.clipping.problem import sum_dtype
from modicum.compute.clipping.rounding import product_rounding
from modicum.compute.clipping.sums import longest_run, weighted_outer, weighted_rows


@runtime_checkable
class SumsByClient(Protocol):
    """A kept piece whose examples lie client by client."""

    def client_sums(self, weights: Tensor | None, clients: int) -> Tensor:
        """Weighted sums of gradients, one a client; without weights every example counts once."""


def write_client_sums(out: Tensor, kept: Kept, weights: Tensor | None, size: int) -> None:
    """out[i] = Σ_b weights[i, b] · gradient[i, b]; weights are (clients, size), None for ones."""
    at_once = isinstance(kept, LinearWeight) and _one_product(kept, weights, size)
    if isinstance(kept, LinearWeight) and at_once and (out.is_cuda or torch.get_num_threads() == 1):
        torch.bmm(*_factors(kept, weights, len(out)), out=out)
    else:  # several threads are slow where their products do not lie side by side, so these are copied
        out.copy_(client_sums(kept, weights, len(out), size))


def subtract_client_sums(out: Tensor, kept: Kept, rate: float, size: int) -> None:
    """out[i] −= rate · Σ_b gradient[i, b], where the clients of `out` lie side by side."""
    if isinstance(kept, LinearWeight):
        g, a = _factors(kept, None, len(out))
        out.baddbmm_(g.contiguous(), a, alpha=-rate)
    else:
        out.sub_(client_sums(kept, None, len(out), size), alpha=rate)


def client_sums(kept: Kept, weights: Tensor | None, clients: int, size: int) -> Tensor:
    """The same as a tensor of its own, (clients, *shape)."""
    if isinstance(kept, LinearWeight) and _one_product(kept, weights, size):
        return torch.bmm(*_factors(kept, weights, clients))
    if isinstance(kept, LinearWeight) and weights is not None and kept.a.shape[1] == 1:
        a, g = (t.reshape(clients, size, -1) for t in (kept.a, kept.g))
        return weighted_outer(weights, g, a)
    if isinstance(kept, Dense):
        return _dense(kept.gradients, weights, clients)
    if isinstance(kept, SumsByClient):
        return kept.client_sums(weights, clients)
    return _one_by_one(kept, weights, clients, size)


def _one_product(kept: LinearWeight, weights: Tensor | None, size: int) -> bool:
    """Whether one product of the factors in their own precision will do: always, where nothing is clipped."""
    few = kept.a.shape[1] == 1 and longest_run(size, kept.g.dtype) >= size
    return weights is None or (few and product_rounding(kept.g.device, kept.g.dtype) == 0)


def _factors(kept: LinearWeight, weights: Tensor | None, clients: int) -> tuple[Tensor, Tensor]:
    g = kept.g if weights is None else kept.g * weights.reshape(-1, 1, 1)
    g = g.reshape(clients, -1, g.shape[2]).transpose(1, 2)
    return g, kept.a.reshape(clients, -1, kept.a.shape[2])


def _dense(gradients: Tensor, weights: Tensor | None, clients: int) -> Tensor:
    flat = gradients.reshape(clients, gradients.shape[0] // clients, -1)
    total = flat.sum(1) if weights is None else weighted_rows(weights, [flat])
    return total.view(clients, *gradients.shape[1:])


def _one_by_one(kept: Kept, weights: Tensor | None, clients: int, size: int) -> Tensor:
    """For pieces that know only how to sum everything, such as convolutions on a CPU."""
    parts = [kept.rows(slice(i * size, (i + 1) * size)) for i in range(clients)]
    if weights is None:
        example = _example_of(kept)
        weights = example.new_ones(1, size, dtype=sum_dtype(example)).expand(clients, size)
    return torch.stack([part.weighted_sum(w) for part, w in zip(parts, weights, strict=True)])


def _example_of(kept: Kept) -> Tensor:
    """A tensor of the piece's own precision and place."""
    inner: object = getattr(kept, "kept", kept)
    found = getattr(inner, "g", getattr(inner, "gradients", getattr(inner, "sums", None)))
    assert isinstance(found, Tensor)
    return found
