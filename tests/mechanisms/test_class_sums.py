"""Class sums and counts: one query whose joint sensitivity holds for any record; a budget divided as planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Decision
from modicum.core.parts import CLASS_COUNTS, CLASS_SUMS, Asked
from modicum.errors import UserError
from modicum.federation.plausible import objection
from modicum.mechanisms.class_sums import ClassSums, LinearHead, class_sums
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.accounting.gdp import epsilon_from_mu
from modicum.privacy.events import Release
from modicum.privacy.spec import Adjacency

CLASSES, SIZE = 3, 6
ODD = torch.tensor([math.inf, math.nan, 1e308, -1e308, 0.0, 1.0], dtype=torch.float64)


def records(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, SIZE, generator=g, dtype=torch.double) * scale, torch.randint(CLASSES, (8,), generator=g)


def event(mechanism: ClassSums) -> Release:
    facts = ClientFacts("c", 8, 1.0, mechanism.total)
    plan = mechanism.plan(facts, ())
    return mechanism._event(Asked(facts, plan, Broadcast("r", 0, "c", Decision(1.0), torch.zeros(1)), 0))


Sums = Callable[[Tensor, Tensor, tuple[int, ...]], tuple[Tensor, Tensor]]


def moves_within_the_bound(sums: Sums, seed: int, scale: float, odd: bool, kappa: float) -> None:
    release = event(ClassSums(rounds=1, total=1, counts=kappa))
    x, y = records(seed, scale)
    if odd:
        x[2] = ODD
    other, labels = x.clone(), y.clone()
    other[2], labels[2] = records(seed + 1, scale)[0][0], (y[2] + seed) % CLASSES

    def distance(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> float:
        stds = [b.noise_std for b in release.blocks]
        return math.sqrt(sum(float(((a - b) / s).square().sum()) for a, b, s in zip(one, two, stds, strict=True)))

    rest = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    shape = (CLASSES, SIZE)
    whole = sums(x, y, shape)
    z = release.noise_multiplier
    assert distance(whole, sums(x[rest], y[rest], shape)) <= (1 + 1e-9) / z
    assert distance(whole, sums(other, labels, shape)) <= 2 * (1 + 1e-9) / z


scales = st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 1.0, 1e3, 1e200])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**20), scale=scales, odd=st.booleans(), kappa=st.sampled_from([0.01, 0.3, 1.0, 5.0]))
def test_one_record_moves_sums_and_counts_by_at_most_the_joint_sensitivity(
    seed: int, scale: float, odd: bool, kappa: float
) -> None:
    moves_within_the_bound(class_sums, seed, scale, odd, kappa)


def uncut(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return x.new_zeros(shape).index_add_(0, y, x), torch.bincount(y, minlength=shape[0]).double()


def counted_twice(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    sums, counts = class_sums(x, y, shape)
    return sums, 2 * counts


def normalised_by_the_mean(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Every record is centred on all of them, so that one moves the others."""
    return class_sums(x - x.mean(0), y, shape)


@pytest.mark.parametrize("mutant", [uncut, counted_twice, normalised_by_the_mean])
def test_sums_that_break_the_bound_are_caught(mutant: Sums) -> None:
    def tried() -> None:
        for seed in range(10):
            for scale in (0.1, 0.3, 1.0):
                moves_within_the_bound(mutant, seed, scale, False, 0.3)

    with pytest.raises(AssertionError):
        tried()


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_budget_is_divided_as_planned(adjacency: str) -> None:
    after = RecordLocal(steps=2, adjacency=Adjacency(adjacency))
    mechanism = ClassSums(rounds=1, total=6, share=0.2, after=after)
    facts = ClientFacts("c", 100, 1.0, 6)
    first, rest = mechanism.plan(facts, ()).releases
    moves = 2.0 if adjacency == "replace-one" else 1.0
    mu2 = [r.count * (moves / r.noise_multiplier) ** 2 for r in (first, rest)]
    assert mu2[0] / sum(mu2) == pytest.approx(0.2, rel=1e-3)
    assert (first.count, rest.count) == (1, 10)
    assert epsilon_from_mu(math.sqrt(sum(mu2)), 1e-5) == pytest.approx(1.0, rel=1e-3)
    alone = ClassSums(rounds=3, total=3, after=after).plan(replace(facts, participations=3), ()).releases
    assert len(alone) == 1
    assert alone[0].count * (moves / alone[0].noise_multiplier) ** 2 == pytest.approx(sum(mu2), rel=1e-3)


def test_what_an_answer_can_be() -> None:
    """All records in one class are believed, twice as many are not."""
    from modicum.core.messages import Noised
    from tests.mechanisms.stage import Stage, loop

    mechanism = ClassSums(rounds=1, total=1)
    backend, theta = loop(nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES)).double())
    kit = Stage(mechanism, backend, declared=8).kit()
    facts = ClientFacts("c", 10_000, 8.0, 1)
    asked = Asked(facts, mechanism.plan(facts, ()), Broadcast("r", 0, "c", Decision(1.0), theta), 0)
    expected = mechanism.expected(asked, kit)
    update = torch.zeros(CLASSES * (SIZE + 1), dtype=torch.double)
    update[0] = update[CLASSES * SIZE] = 10_000.0
    assert objection(Noised("c", 0, update, {}), expected, theta) is None
    assert objection(Noised("c", 0, 2 * update, {}), expected, theta) is not None
    assert expected.facts.variance < expected.facts.signal_variance[CLASS_COUNTS]
    assert mechanism._event(asked).blocks[0].name == CLASS_SUMS


def test_only_a_linear_model_takes_sums() -> None:
    LinearHead().wrap(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    for model in (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), nn.Linear(4, 3, bias=False)):
        with pytest.raises(UserError, match=r"model\.name = logistic"):
            LinearHead().wrap(model)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match="in 1 to 3 rounds"):
        ClassSums(rounds=4, total=3)
    with pytest.raises(UserError, match="above 0"):
        ClassSums(rounds=1, total=3, counts=0.0)
    with pytest.raises(UserError, match="whole-batch"):
        ClassSums(rounds=1, total=3, after=RecordLocal(batch=4))
