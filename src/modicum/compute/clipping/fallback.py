"""For models that book-keeping does not cover: a gradient for each example, by torch.func or one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.clipping.flat import Problem
from modicum.compute.clipping.problem import (
    ClippedSum,
    Loss,
    check_losses,
    example_factors,
    rows,
    sum_dtype,
    zero_like,
)
from modicum.compute.clipping.reference import reference_clipped_sum
from modicum.compute.clipping.sums import as_released, only_rows, square_norms

KEEP = 1 << 24
"""Numbers of per-example gradients that exist at a time, of all parameters together."""


def fallback_clipped_sum(problem: Problem) -> ClippedSum:
    """Per-example gradients by vmap, in chunks that bound the memory."""
    model, loss, x, y, clip = problem.model, problem.loss, problem.x, problem.y, problem.clip
    trained, examples, weights = problem.trained, problem.examples, problem.weights
    step = max(1, KEEP // max(1, sum(p.numel() for p in trained.values())))
    if weights is None:
        weights = next(iter(trained.values())).new_ones(examples)
    total = {name: zero_like(p).double() for name, p in trained.items()}
    norms = []
    for start in range(0, examples, step):
        part = slice(start, start + step)
        gradients = _gradients(model, loss, rows(x, part), rows(y, part), trained)
        found = {name: g.to(sum_dtype(trained[name])).flatten(1) for name, g in gradients.items()}
        squares = torch.stack([square_norms(g) for g in found.values()], dim=1)
        dtype = next(iter(found.values())).dtype
        factors, norm, finite = example_factors(clip, list(found), squares, weights[part], dtype)
        for j, (name, g) in enumerate(found.items()):
            total[name] += (factors[:, j].double() @ only_rows(g, finite).double()).view_as(total[name])
        norms.append(norm)
    sums = {name: as_released(t, examples, sum_dtype(trained[name])) for name, t in total.items()}
    return ClippedSum(sums, torch.cat(norms))


def one_at_a_time(problem: Problem) -> ClippedSum:
    """For models of which no more is known: nothing else is near an example while it is computed. One for which
    the model fails counts as zero, for itself alone."""
    return reference_clipped_sum(
        problem.model,
        problem.loss,
        problem.x,
        problem.y,
        problem.clip,
        weights=problem.weights,
        parameters=list(problem.trained),
        alone=True,
    )


def _gradients(
    model: nn.Module, loss: Loss, x: Any, y: Any, trained: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """(B, *shape) gradients by parameter name; each example sees the model as a batch of one."""
    values = {name: p.detach() for name, p in trained.items()}

    def loss_of_one(parameters: dict[str, Tensor], one_x: Any, one_y: Any) -> Tensor:
        output = torch.func.functional_call(model, parameters, (rows(one_x, None),))
        return check_losses(loss(output, rows(one_y, None)), 1)[0]

    per_example = torch.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    gradients: dict[str, Tensor] = per_example(values, x, y)
    return gradients
