"""A short search for a row whose values change what is computed of others: (c′) of docs/floating-point.md.

One shape, one device, one number of threads: whatever a row holds, the others' bits must stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from modicum.compute.clipping.capture import REPEATED
from modicum.compute.clipping.flat import Problem
from modicum.compute.clipping.problem import ClippedSum, without_drawing
from modicum.compute.clipping.synthetic import CONTENTS, with_row


def changed_rows(run: Callable[[Problem], ClippedSum], problem: Problem, other: Problem) -> str:
    """What is found to depend on another row's values; empty if nothing is.

    `problem` and `other` are the same batch of synthetic rows, with different numbers. Some rows count
    nothing, and take each content in turn: the sum, and every other row's norm, must keep their bits.
    """
    examples = problem.examples
    changing = sorted({0, examples // 2, examples - 1} if examples > 3 else {0})
    weights = torch.ones(examples, device=problem.device)
    weights[changing] = 0.0
    others = weights.bool()
    problem = replace(problem, weights=weights)

    def seen(one: Problem) -> list[Tensor]:
        with without_drawing(problem.device):
            torch.manual_seed(0)
            found = run(one)
        return [*found.total.values(), found.norms[others]]

    # A simulation's GPU adds up as it likes, and need not repeat itself; a silo's does (`switches`).
    same = _equal if problem.device.type == "cpu" or torch.are_deterministic_algorithms_enabled() else _near
    for _ in range(REPEATED if problem.device.type == "cuda" else 0):
        seen(problem)  # what repeats itself is replayed from then on, and records are
    base = seen(problem)
    if not same(base, seen(problem)):
        return "numbers that are other ones when it is run again"
    for i, (name, content) in enumerate(CONTENTS.items()):
        row = changing[i % len(changing)]
        x, y = (with_row(mine, row, content, its) for mine, its in ((problem.x, other.x), (problem.y, other.y)))
        if not same(base, seen(replace(problem, x=x, y=y))):
            return f"what is computed of other records when one holds {name}"
    return ""


def _equal(base: list[Tensor], found: list[Tensor]) -> bool:
    return all(map(torch.equal, base, found))


def _near(base: list[Tensor], found: list[Tensor]) -> bool:
    """Norms and each parameter's sum, up to a small part of the whole: where all terms cancel, as of the bias of
    an attention's keys, a sum is nothing but rounding."""
    sizes = torch.stack([torch.linalg.vector_norm(t.double()) for t in base])
    off = torch.stack([torch.linalg.vector_norm((one - t).double()) for one, t in zip(found, base, strict=True)])
    whole = torch.linalg.vector_norm(sizes[:-1])
    return bool((off[:-1] <= 1e-2 * sizes[:-1] + 1e-3 * whole).all() and off[-1] <= 1e-2 * sizes[-1])
