"""For models that book-keeping does not cover: a gradient for each example, by torch.func or one by one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.even_linear import evened
from modicum.compute.even_products import even_products
from modicum.compute.flat import Problem
from modicum.compute.problem import (
    ROWS,
    ClippedSum,
    Loss,
    check_losses,
    example_factors,
    rows,
    sum_dtype,
    with_zero_rows,
    zero_like,
)
from modicum.compute.reference import reference_clipped_sum
from modicum.compute.sums import as_released, square_norms


def fallback_clipped_sum(problem: Problem) -> ClippedSum:
    """Per-example gradients by vmap, in chunks that bound the memory; one by one where vmap cannot follow."""
    model, loss, x, y, clip = problem.model, problem.loss, problem.x, problem.y, problem.clip
    trained, examples, weights = problem.trained, problem.examples, problem.weights
    step = _rows_at_a_time(sum(p.numel() for p in trained.values()))
    if weights is None:
        weights = next(iter(trained.values())).new_ones(examples)
    total = {name: zero_like(p).double() for name, p in trained.items()}
    norms = []
    try:
        for start in range(0, examples, step):
            part = slice(start, start + step)
            few = len(weights[part])
            more = min(step, examples) - few  # all parts are alike: a row's bits may depend on how many there are
            part_x, part_y = (with_zero_rows(rows(tree, part), more) for tree in (x, y))
            gradients = {n: g[:few] for n, g in _gradients(model, loss, part_x, part_y, trained).items()}
            found = {name: g.to(sum_dtype(trained[name])).reshape(few, -1) for name, g in gradients.items()}
            squares = torch.stack([square_norms(g) for g in found.values()], dim=1)
            dtype = next(iter(found.values())).dtype
            factors, norm, finite = example_factors(clip, list(found), squares, weights[part], dtype)
            for j, (name, g) in enumerate(found.items()):
                total[name] += (factors[finite, j].double() @ g[finite].double()).view_as(total[name])
            norms.append(norm)
    except (RuntimeError, NotImplementedError):
        return one_at_a_time(problem)
    sums = {name: as_released(t, examples, sum_dtype(trained[name])) for name, t in total.items()}
    return ClippedSum(sums, torch.cat(norms))


def one_at_a_time(problem: Problem) -> ClippedSum:
    """For models of which no more is known: nothing else is near an example while it is computed."""
    return reference_clipped_sum(
        problem.model,
        problem.loss,
        problem.x,
        problem.y,
        problem.clip,
        weights=problem.weights,
        parameters=list(problem.trained),
    )


KEEP = 1 << 24
"""Numbers of per-example gradients that exist at a time, of all parameters together."""


def _rows_at_a_time(parameters: int) -> int:
    """As many as memory allows; where many, a multiple of what is enough for any batch."""
    most = max(1, KEEP // max(1, parameters))
    return most if most < ROWS else most - most % ROWS


def _gradients(
    model: nn.Module, loss: Loss, x: Any, y: Any, trained: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    """(B, *shape) gradients by parameter name; each example sees the model as a batch of one."""
    values = {name: p.detach() for name, p in trained.items()}

    def loss_of_one(parameters: dict[str, Tensor], one_x: Any, one_y: Any) -> Tensor:
        output = torch.func.functional_call(model, parameters, (rows(one_x, None),))
        return check_losses(loss(output, rows(one_y, None)), 1)[0]

    per_example = torch.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    on_cpu = all(p.device.type == "cpu" for p in values.values())
    with evened(model.modules()), even_products(searched_alone=True) if on_cpu else nullcontext():
        gradients: dict[str, Tensor] = per_example(values, x, y)
    return gradients
