"""Small linear layers: a record that joins a batch moves where the others stand, and nothing of what they add."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute import Flat, bookkeeping, clipped_sum, even_linear, even_products, reference_clipped_sum
from tests.compute.helpers import cross_entropy

SIZES = [(30, 3), (5, 4), (7, 10), (13, 2)]
RECORDS = 64

pytestmark = pytest.mark.filterwarnings("ignore::modicum.compute.clipped_sum.SlowClippingWarning")


class Scaled(nn.Module):
    """A parameter of its own beside a linear layer: only the fall-back can clip it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found * self.scale


class Bare(nn.Module):
    """Multiplies with weights behind their layer's back, as attention does."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.inner.weight, self.inner.bias)


class Mapped(nn.Module):
    """A matrix that is nobody's layer, such as a public geometry, before the layer that is trained."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.Linear(inner.out_features, inner.out_features)
        self.weight, self.bias = (nn.Buffer(p.detach()) for p in (inner.weight, inner.bias))
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(inner.out_features))
            self.inner.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x @ self.weight.t() + self.bias)
        return found


class Part(Mapped):
    """The same of a part of rows that are wider: they begin at odd addresses whatever the matrix's sizes are."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(torch.cat([x, x[:, :1]], 1)[:, 1:] @ self.weight.t() + self.bias)
        return found


Wrapper = Callable[[nn.Linear], nn.Module]
KINDS: list[tuple[Wrapper, list[tuple[int, int]]]] = [
    (lambda layer: layer, SIZES),
    (Scaled, SIZES),
    (Bare, [(7, 10), (5, 4)]),
    (Mapped, [(7, 10), (5, 10)]),
    (Part, [(16, 4), (64, 8)]),
]


def hostile_models(kind: Wrapper, size: int, classes: int) -> Iterator[nn.Module]:
    """Whose weights cancel: what two classes come to hangs on the order in which a row is added up."""
    draw, layer = torch.Generator().manual_seed(1), nn.Linear(size, classes)
    for _ in range(20):
        large, small, middle = torch.randperm(size, generator=draw)[:3].tolist()
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
            layer.weight[1, large], layer.weight[1, small], layer.weight[1, middle] = 1e12, -1e12, 2e4
            layer.bias[1] = -1e4
            yield kind(layer)


def most_moved(kind: Wrapper, size: int, classes: int) -> float:
    """In units of C, with labels that fit what each row comes to."""
    found, x = 0.0, torch.ones(RECORDS, size)
    for model in hostile_models(kind, size, classes):
        y = (model(x)[:, 1] > 0).long()
        whole, others = (clipped_sum(model, cross_entropy, x[i:], y[i:], Flat(1.0)).total for i in (0, 1))
        moved = torch.cat([(whole[name].double() - others[name].double()).flatten() for name in whole])
        found = max(found, float(moved.norm()))
    return found


def minds(kind: Wrapper, size: int, classes: int) -> bool:
    """Whether the library itself adds up equal rows in several orders."""
    x = torch.ones(RECORDS, size)
    return any(len(model(x)[:, 1].unique()) > 1 for model in hostile_models(kind, size, classes))


@pytest.mark.parametrize(("kind", "size", "classes"), [(kind, *pair) for kind, pairs in KINDS for pair in pairs])
def test_a_record_moves_a_small_product_s_sum_by_its_bound(kind: Wrapper, size: int, classes: int) -> None:
    """The model is chosen by somebody who knows all records, as a server may."""
    assert most_moved(kind, size, classes) <= 1 + 1e-3


@pytest.mark.parametrize(("kind", "sizes"), KINDS)
def test_without_even_rows_it_would_move_it_by_more(
    monkeypatch: pytest.MonkeyPatch, kind: Wrapper, sizes: list[tuple[int, int]]
) -> None:
    """The twin leaves rows where they are; not every processor's library minds."""
    for place in (even_linear, even_products):
        monkeypatch.setattr(place, "uneven_sizes", lambda *_: False)
    if not any(minds(kind, *pair) for pair in sizes):
        pytest.skip("this library adds up all rows alike")
    assert max(most_moved(kind, *pair) for pair in sizes) > 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "classes"), SIZES)
def test_filling_up_changes_no_value(size: int, classes: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(size, classes, bias=bias).double()
    x = torch.randn(9, 2, size, generator=draw, dtype=torch.double)
    assert even_linear.uneven(layer)
    torch.testing.assert_close(even_linear.even_linear(layer, x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "classes"), [*SIZES, (784, 64), (64, 10)])
def test_a_pass_of_its_own_gives_the_same_bits(size: int, classes: int, bias: bool) -> None:
    """Forth and back, and what it shows on the way is the gradient of the output."""
    draw, shown = torch.Generator().manual_seed(0), []
    layer = nn.Linear(size, classes, bias=bias).requires_grad_(False)
    x, seeds = (torch.randn(20, n, generator=draw) for n in (size, classes))
    x.requires_grad_()
    anchor = torch.zeros((), requires_grad=True)
    found = even_linear.shown_linear(layer, x, anchor, shown.append)
    truth = even_linear.even_linear(layer, x)
    assert torch.equal(found, truth)
    assert torch.equal(*(torch.autograd.grad(output, x, seeds)[0] for output in (found, truth)))
    assert torch.equal(shown[0], seeds)


def test_models_run_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained layers take it, for rows of numbers; others are filled up as they are."""
    passed: list[int] = []
    real = even_linear.shown_linear

    def noted(layer: nn.Linear, *rest: Any) -> Tensor:
        passed.append(layer.in_features)
        return real(layer, *rest)

    monkeypatch.setattr(bookkeeping, "shown_linear", noted)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 3))
    model[2].requires_grad_(False)
    x, y = torch.rand(20, 4), torch.arange(20) % 3
    found = clipped_sum(model, cross_entropy, x, y, Flat(0.1))
    assert passed == [4, 5]
    truth = reference_clipped_sum(model, cross_entropy, x, y, Flat(0.1))
    for name, total in truth.total.items():
        torch.testing.assert_close(found.total[name], total)
    assert not any("forward" in vars(part) for part in model.modules())
