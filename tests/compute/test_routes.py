"""No record decides over the way in which the others' gradients are computed.

Two ways give the same numbers up to their last bits, and a model may be made of which nothing but last bits is
left: terms that cancel. Then a change of way moves everybody's contribution, each within its bound and all
together far beyond one.
"""

from __future__ import annotations

from importlib import import_module
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat, clipped_sum
from modicum.compute import probe as probe_module
from modicum.compute.bookkeeping import PassRecorder
from modicum.compute.fallback import fallback_clipped_sum
from modicum.compute.flat import Problem
from modicum.compute.fused import FusedBackend
from modicum.compute.pieces import EmbeddingWeight
from modicum.compute.problem import ClippedSum, Parts
from modicum.compute.rules import pieces
from modicum.core.parts import Batch
from tests.compute.helpers import cross_entropy

N = 41


def cancelling() -> nn.Module:
    """Of the convolution's gradient nothing is left but rounding, where an image is the same everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 26 * 26, 3))
    weights = torch.randn(3, 8, 676, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.mul_(1e-12)
        model[0].bias.zero_()
        model[2].weight.copy_(1e8 * (weights - weights.mean(2, keepdim=True)).flatten(1))
        model[2].bias.zero_()
    return model


def records() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.rand(N, 1, 1, 1).expand(N, 1, 28, 28).contiguous()
    x[-1] = 3e38  # its gradient is not finite
    return x, torch.randint(3, (N,))


def movement(model: nn.Module) -> float:
    """What a record whose gradient is not finite moves the sum by, over C: nothing, it should be."""
    x, y = records()
    present, absent = (clipped_sum(model, cross_entropy, x[:n], y[:n], Flat(1.0)).total for n in (N, N - 1))
    return sum(float((present[k].double() - absent[k].double()).square().sum()) for k in present) ** 0.5


def test_a_record_that_is_not_finite_changes_nothing_for_the_others() -> None:
    assert movement(cancelling()) <= 1e-3


def test_the_fall_back_for_such_batches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a batch with such a record is computed in another way."""
    real = Clipper._by_books

    def falls_back(self: Clipper, problem: Problem, seen: frozenset[str]) -> ClippedSum | None:
        return real(self, problem, seen) if bool((problem.x < 1e30).all()) else None

    monkeypatch.setattr(Clipper, "_by_books", falls_back)
    assert movement(cancelling()) > 2


def test_zeros_that_are_not_finite_change_nothing() -> None:
    """Rows of zeros fill batches up; a model may be sent for which only they overflow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.fill_(-1e30)
        model[0].bias.fill_(4e30)  # without inputs that add up to four this stays, and its square overflows
    x, y = torch.ones(33, 4), torch.arange(33) % 3
    found, truth = (clipped_sum(model, cross_entropy, x[:n], y[:n], Flat(1.0)) for n in (33, 32))
    assert bool((found.norms > 0).all())
    torch.testing.assert_close(found.norms[:32], truth.norms, rtol=0.0, atol=0.0)


def verdicts() -> list[bool]:
    """Of a hostile model on batches of which one holds a record that no computation survives."""
    x, y = records()
    found = []
    for n in (N, N - 1):
        clipper = Clipper(cancelling())
        clipper(cross_entropy, x[:n], y[:n], Flat(1.0))
        found.append(clipper._right == {} or not all(clipper._right.values()))
    return found


def test_a_verdict_does_not_hang_on_records() -> None:
    assert verdicts() == [False, False]


def test_a_probe_of_the_records_themselves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("modicum.compute.clipped_sum"), "probe", probe_module._probe)
    assert any(verdicts())


class Rooted(nn.Module):
    """Of some numbers there is no root, and the more are drawn the sooner one of these is among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 1), nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x).rsqrt())
        return found


def books_of(n: int) -> bool:
    x, y = torch.rand(n, 7), torch.arange(n) % 4
    with patch.object(PassRecorder, "settle", autospec=True, side_effect=PassRecorder.settle) as settled:
        clipped_sum(Rooted(), cross_entropy, x, y, Flat(1.0))
    return settled.called


def test_a_verdict_does_not_hang_on_how_many_records_there_are() -> None:
    assert len({books_of(n) for n in (16, 40, 1000)}) == 1


def test_a_probe_of_as_many_numbers_as_there_are_records_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "FEWEST", 10**9)
    assert len({books_of(n) for n in (16, 40, 1000)}) == 2


def test_in_a_stack_a_record_that_is_not_finite_changes_nothing_for_the_others() -> None:
    x, y = records()
    model = cancelling()
    backend = FusedBackend(model)
    theta = backend.layout.flatten(dict(model.named_parameters())).detach().expand(2, -1).contiguous()

    def sums(n: int) -> Tensor:
        batches = [Batch(x[:n], {"y": y[:n]}), Batch(x[:20], {"y": y[:20]})]
        loss = lambda outputs, targets: cross_entropy(outputs, targets["y"])  # noqa: E731
        return backend._engine.clipped_sums(theta, batches, loss, [Flat(), Flat()])[0]

    torch.testing.assert_close(sums(N), sums(N - 1), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("by_layer", [True, False])
def test_how_an_example_is_measured_does_not_depend_on_how_many_there_are(
    by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin keeps gradients as long as all of them together are small, and measures factors beyond that."""
    torch.manual_seed(0)
    layer = nn.Conv2d(128, 256, 3, 2, 1)
    inputs, outputs = torch.randn(8, 128, 16, 16), torch.randn(8, 256, 8, 8)
    if not by_layer:
        monkeypatch.setattr("modicum.compute.convolution.too_large", lambda *_, **__: next(growing))
    growing = iter((False, True))
    few, more = (pieces(layer, inputs[:n], outputs[:n])["weight"].measure()[0][:4] for n in (4, 8))
    assert torch.equal(few, more) is by_layer


def test_the_fall_back_computes_parts_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("modicum.compute.fallback.KEEP", 7 * 15)
    model = nn.Linear(4, 3)
    trained = dict(model.named_parameters())

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs, y)

    real = torch.vmap
    monkeypatch.setattr(
        torch, "vmap", lambda f, **k: lambda w, x, y: (seen.append(len(x)), real(f, **k)(w, x, y))[1]
    )
    x, y = torch.randn(32, 4), torch.arange(32) % 3
    fallback_clipped_sum(Problem(model, trained, loss, x, y, Flat(1.0), None, 32, Parts(model)))
    assert seen == [7] * 5


@pytest.mark.parametrize("batch", [32, 64, 512])
def test_norms_do_not_depend_on_how_many_examples_there_are(batch: int) -> None:
    """What is charged for rounding must not: it would change everybody's factor."""
    torch.manual_seed(0)
    indices, g = torch.randint(3, (batch, 12)), torch.randn(batch, 12, 4)
    assert torch.equal(
        EmbeddingWeight(indices, g, 3, None).measure()[0][:8],
        EmbeddingWeight(indices[:8], g[:8], 3, None).measure()[0],
    )
