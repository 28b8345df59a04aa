"""Squares of tiny numbers vanish in float32: beside huge ones, norms must not vanish with them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modicum.compute import Auto, Clip, Flat, clipped_sum
from modicum.compute.clipping.convolution import ConvWeight, Geometry
from modicum.compute.clipping.pieces import LinearWeight

Pieces = Callable[[float, float], LinearWeight | ConvWeight]
SIZES = [1e-24, 1e-22, 1e-18, 1e-8, 1.0, 1e8, 1e17]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def one_place(inputs: float, outputs: float) -> LinearWeight:
    return LinearWeight(inputs * numbers(3, 1, 40), outputs * numbers(3, 1, 30))


def places(inputs: float, outputs: float) -> LinearWeight:
    return LinearWeight(inputs * numbers(3, 2, 200), outputs * numbers(3, 2, 150))


def convolution(inputs: float, outputs: float) -> ConvWeight:
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    return ConvWeight(
        inputs * numbers(3, 64, 3, 3), outputs * numbers(3, 64, 3, 3), geometry, torch.Size((64, 64, 3, 3))
    )


def exact(piece: LinearWeight | ConvWeight) -> Tensor:
    if isinstance(piece, LinearWeight):
        whole: Tensor = LinearWeight(piece.a.double(), piece.g.double()).dense()
    else:
        whole = ConvWeight(piece.a.double(), piece.g.double(), piece.geometry, piece.shape).dense()
    return whole.flatten(1).norm(dim=1)


@pytest.mark.parametrize("make", [one_place, places, convolution])
@pytest.mark.parametrize(("inputs", "outputs"), list(product(SIZES, SIZES)))
def test_norms_are_never_too_small(make: Pieces, inputs: float, outputs: float) -> None:
    piece = make(inputs, outputs)
    squares, kept = piece.measure()
    assert kept is piece  # the route by products of lengths, not by gradients
    found, truth = squares.double().sqrt(), exact(piece)
    # What is lost below 1e-15 is far below any bound; what overflows is left out of sums.
    assert bool(((found >= truth * (1 - 1e-5) - 1e-15) | ~found.isfinite()).all())
    if 1e-14 < inputs * outputs < 1e16 and min(inputs, outputs) >= 1e-8:
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=0.0)


def test_the_mutant_without_allowance_fails() -> None:
    piece = one_place(1e17, 1e-24)
    squares = piece.a.square().sum((1, 2)) * piece.g.square().sum((1, 2))
    assert bool((squares.double().sqrt() < 0.5 * exact(piece)).all())


def chosen_by_a_hostile_server(classes: int, width: int, gap: float) -> nn.Module:
    """Finite weights, an ordinary architecture: inputs of 1e19 for the last layer, and a class it is sure of."""
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, classes))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model[0].bias.fill_(1.7e19 / width**0.5)  # type: ignore[operator]
        model[2].bias[0] = gap  # type: ignore[index]
    return model


@pytest.mark.parametrize("clip", [Flat(1e-3), Auto(1e-3)])
@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("gap", [48.0, 52.2, 56.0])
def test_no_model_makes_a_record_count_for_more(clip: Clip, classes: int, gap: float) -> None:
    model = chosen_by_a_hostile_server(classes, 64, gap)
    x, y = torch.rand(2, 8), torch.zeros(2, dtype=torch.long)
    for _ in range(2):  # once with the probe, once without
        found = clipped_sum(
            model, lambda o, t: cross_entropy(o, t, reduction="none"), x, y, clip, weights=torch.tensor([1.0, 0.0])
        )
        size = sum(float(v.double().square().sum()) for v in found.total.values()) ** 0.5
        assert size <= 1e-3 * (1 + 1e-4)
