"""The slow truth: one example at a time, with nothing but autograd."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.clipping.problem import (
    ClippedSum,
    Loss,
    batch_size,
    check_losses,
    check_weights,
    example_factors,
    nothing,
    rows,
    sum_dtype,
    trained_parameters,
    zero_like,
)
from modicum.compute.clipping.sums import as_released, square_norms
from modicum.core.clips import Clip
from modicum.errors import UserError


def reference_clipped_sum(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    clip: Clip,
    *,
    weights: Tensor | None = None,
    parameters: Iterable[str] | None = None,
    alone: bool = False,
) -> ClippedSum:
    """The same as `clipped_sum`, one forward and one backward pass per example.

    `alone`: an example for which the model raises an error has a zero gradient, and what layers draw for one does
    not depend on how much they drew for another."""
    trained = trained_parameters(model, parameters)
    examples = batch_size(x)
    check_weights(weights, examples)
    answer = nothing(trained, examples)
    if examples == 0 or not trained:
        return answer
    dtype = sum_dtype(next(iter(trained.values())))
    total = {name: t.double() for name, t in answer.total.items()}
    norms = []
    seeds = torch.randint(2**53, (examples + 1,)).tolist() if alone else []
    for i in range(examples):
        one = slice(i, i + 1)
        if alone:
            torch.manual_seed(seeds[i])
        try:
            gradient = _gradient(model, loss, rows(x, one), rows(y, one), trained)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception:
            if not alone:
                raise
            gradient = [zero_like(p) for p in trained.values()]
        squares = torch.cat([square_norms(g.reshape(1, -1)) for g in gradient]).unsqueeze(0)
        weight = None if weights is None else weights[one]
        factors, norm, finite = example_factors(clip, list(trained), squares, weight, dtype)
        norms.append(norm)
        if finite.item():
            for j, (name, g) in enumerate(zip(trained, gradient, strict=True)):
                total[name] += factors[0, j].double() * g
    if alone:
        torch.manual_seed(seeds[-1])
    sums = {name: as_released(t, examples, dtype) for name, t in total.items()}
    return ClippedSum(sums, torch.cat(norms))


def _gradient(model: nn.Module, loss: Loss, x: Any, y: Any, trained: dict[str, nn.Parameter]) -> list[Tensor]:
    flags = [p.requires_grad for p in trained.values()]
    for p in trained.values():
        p.requires_grad_(True)
    try:
        with torch.enable_grad():
            value = check_losses(loss(model(x), y), 1).sum()
            if not value.requires_grad:
                return [zero_like(p) for p in trained.values()]
            gradient = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    finally:
        for p, flag in zip(trained.values(), flags, strict=True):
            p.requires_grad_(flag)
    return [
        zero_like(p) if g is None else g.to(sum_dtype(p)) for p, g in zip(trained.values(), gradient, strict=True)
    ]
