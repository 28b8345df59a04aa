"""Clients that count otherwise than by their records: what public records make of the head that they led to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from modicum.aggregation import Mean, Momentum, NoiseAware, Paced, Weighted
from modicum.aggregation.anchored import BETWEEN, anchored, off
from modicum.core.facts import ClientFacts, FeatureFacts, PublicFacts
from modicum.core.parts import Aggregation

SIZE, CLASSES, ROUNDS = 3, 2, 10


def records(count: int = 60) -> tuple[Tensor, Tensor]:
    """Three quarters of class 1, whatever their features."""
    x = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(0))
    return x / x.norm(dim=1, keepdim=True), (torch.arange(count) % 4 > 0).long()


def facts(*multipliers: float, sizes: tuple[int, ...] = (50, 50)) -> PublicFacts:
    x, y = records()
    counts = torch.bincount(y, minlength=CLASSES).double()
    features = FeatureFacts(CLASSES, sums=torch.zeros(CLASSES, SIZE).double(), counts=counts, known=(x, y))
    clients = tuple(ClientFacts(f"c{i}", n, 1.0, ROUNDS) for i, n in enumerate(sizes))
    noises = {c.name: z for c, z in zip(clients, multipliers, strict=True)}
    return PublicFacts(clients, ROUNDS, CLASSES * (SIZE + 1), noises, features=features)


def rule(base: Aggregation | None = None, *, summed: bool = False) -> Paced:
    return Paced(Momentum(base or NoiseAware(), 0.5), 0.3, 1.2, summed=summed, constant=0.3)


def test_it_is_the_posterior_mode() -> None:
    """The gradient of loss and prior together is zero there; a weak prior moves it further than a strong one."""
    (x, y), start = records(), torch.randn(CLASSES, SIZE, generator=torch.Generator().manual_seed(1)).double()
    moved = []
    for variance in (0.01, 1.0):
        found = anchored(start, x, y, variance).requires_grad_(True)
        value = cross_entropy(x.double() @ found.T, y, reduction="sum")
        value = value + (found - start).square().sum() / (2 * variance)
        (gradient,) = torch.autograd.grad(value, found)
        assert gradient.norm() < 1e-3
        moved.append((found - start).norm().item())
    assert 0 < moved[0] < moved[1]


def test_a_wrong_share_of_a_class_is_put_right() -> None:
    """A head that finds class 0 everywhere, as clients of large budgets had it: public records know better."""
    x, y = records()
    made, public = rule(summed=True), facts(1.0, 20.0)
    state = made.init(public)
    model = torch.zeros(CLASSES * (SIZE + 1))
    model[CLASSES * SIZE] = 2 / 0.3  # the bias of class 0 is 2 in a logit
    kept = made.reported(state, model)
    logits = x @ kept[: CLASSES * SIZE].view(CLASSES, SIZE).T + 0.3 * kept[CLASSES * SIZE :]
    before = torch.tensor([2.0, 0.0]).expand(len(y), 2)
    assert cross_entropy(logits, y) < 0.6 * cross_entropy(before, y)


@pytest.mark.parametrize("base", [NoiseAware(), Mean(), Weighted()])
def test_clients_that_count_by_their_records_leave_the_model_alone(base: Aggregation) -> None:
    """Not a bit of it, nor is anything kept for it; with other weights something is."""
    made, model = rule(base), torch.ones(CLASSES * (SIZE + 1))
    state = made.init(facts(3.0, 3.0))
    assert "known" not in state
    assert made.reported(state, model) is model
    assert ("known" in rule(base).init(facts(1.0, 9.0, sizes=(50, 10)))) is not isinstance(base, Weighted)


def test_how_far_weights_are_from_records() -> None:
    assert off([1, 1], [50, 50]) == 0
    assert off([1, 0], [50, 50]) == pytest.approx(BETWEEN / 2)
    unequal = facts(1.0, 3.0)
    assert rule(summed=True).weight_variance(unequal) == pytest.approx(BETWEEN * 2 * (3 / 4 - 1 / 2) ** 2)  # n/z
    assert rule().weight_variance(unequal) == pytest.approx(BETWEEN * 2 * (9 / 10 - 1 / 2) ** 2)  # its square
    assert rule(Mean()).weight_variance(unequal) == 0
    assert rule().weight_variance(replace(unequal, multipliers={})) == 0  # without noise nobody counts less


def test_it_says_so() -> None:
    said = " ".join(rule().explain(facts(1.0, 3.0)))
    assert f"off by about {math.sqrt(rule().weight_variance(facts(1.0, 3.0))):.2g}" in said
    assert "drawn to public" not in " ".join(rule().explain(facts(3.0, 3.0)))
