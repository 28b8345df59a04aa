"""A linear head that was learned from some clients more than others, drawn back to everybody by public records.

Where clients count by budget, private releases speak of another mean than that over all records: the head they
lead to differs from everybody's by a variance of BETWEEN·Σ(a_i − s_i)², for weights a_i and shares of records s_i.
Public records with the task's labels speak of everybody. The posterior mode of both joins them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

BETWEEN = 3.0  # variance of a weight from client to client, chosen on public tables cut into unlike clients
STEPS = 30
LEAST = 1e-3  # of a weight: smaller corrections are not worth their time


def off(weights: Sequence[float], records: Sequence[int]) -> float:
    """BETWEEN·Σ(a_i − s_i)² for weights a_i and shares of records s_i, both of which add up to 1."""
    total, everybody = sum(weights), sum(records)
    return BETWEEN * sum((a / total - n / everybody) ** 2 for a, n in zip(weights, records, strict=True))


def anchored(head: Tensor, x: Tensor, y: Tensor, variance: float) -> Tensor:
    """The head (classes × features) with the least Σ loss of public records + ‖head − given‖²/(2·variance)."""
    if variance * len(y) / 4 < LEAST:  # a logit's curvature is at most ¼ for records of length 1
        return head
    start, x = head.detach().double(), x.to(head.device).double()
    found = start.clone().requires_grad_(True)
    search = torch.optim.LBFGS([found], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        fit = cross_entropy(x @ found.T, y.to(head.device), reduction="sum")
        value = fit + (found - start).square().sum() / (2 * variance)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(loss)  # type: ignore[no-untyped-call]
    return found.detach().to(head.dtype)
