"""Small linear layers: a record that joins a batch moves where the others stand, and nothing of what they add."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Flat, clipped_sum, even_linear
from tests.compute.helpers import cross_entropy

SIZES = [(30, 3), (5, 4), (7, 10), (13, 2)]
RECORDS = 64


class Scaled(nn.Module):
    """A parameter of its own beside a linear layer: only the fall-back can clip it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found * self.scale


def most_moved(size: int, classes: int, *, by_books: bool = True) -> float:
    """In units of C, over models whose weights cancel, and labels that fit what each row comes to."""
    draw, found = torch.Generator().manual_seed(1), 0.0
    layer = nn.Linear(size, classes)
    x, model = torch.ones(RECORDS, size), layer if by_books else Scaled(layer)
    for _ in range(20):
        large, small, middle = torch.randperm(size, generator=draw)[:3].tolist()
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
            layer.weight[1, large], layer.weight[1, small], layer.weight[1, middle] = 1e12, -1e12, 2e4
            layer.bias[1] = -1e4
            y = (model(x)[:, 1] > 0).long()
        whole, others = (clipped_sum(model, cross_entropy, x[i:], y[i:], Flat(1.0)).total for i in (0, 1))
        moved = torch.cat([(whole[name].double() - others[name].double()).flatten() for name in whole])
        found = max(found, float(moved.norm()))
    return found


@pytest.mark.filterwarnings("ignore::modicum.compute.clipped_sum.SlowClippingWarning")
@pytest.mark.parametrize("by_books", [True, False])
@pytest.mark.parametrize(("size", "classes"), SIZES)
def test_a_record_moves_a_small_layer_s_sum_by_its_bound(size: int, classes: int, by_books: bool) -> None:
    """The model is chosen by somebody who knows all records, as a server may."""
    assert most_moved(size, classes, by_books=by_books) <= 1 + 1e-3


@pytest.mark.filterwarnings("ignore::modicum.compute.clipped_sum.SlowClippingWarning")
@pytest.mark.parametrize("by_books", [True, False])
def test_without_even_rows_it_would_move_it_by_more(monkeypatch: pytest.MonkeyPatch, by_books: bool) -> None:
    """The twin leaves rows where they are; not every processor's library minds."""
    monkeypatch.setattr(even_linear, "uneven", lambda _: False)
    found = max(most_moved(size, classes, by_books=by_books) for size, classes in SIZES)
    if found <= 1 + 1e-3:
        pytest.skip("this library adds up all rows alike")
    assert found > 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("size", "classes"), SIZES)
def test_filling_up_changes_no_value(size: int, classes: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(size, classes, bias=bias).double()
    x = torch.randn(9, 2, size, generator=draw, dtype=torch.double)
    assert even_linear.uneven(layer)
    torch.testing.assert_close(even_linear.even_linear(layer, x), layer(x))
