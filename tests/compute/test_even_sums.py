"""Records that lie side by side in memory, place after place: what is added up of one is the same in any row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat, row_steps, rules
from modicum.compute.row_steps import operations
from modicum.compute.searched import ALIKE
from tests.compute.test_even_products import cancelling, squares

ROWS, PLACES, WIDE = 20, 12, 13


def place_after_place() -> Tensor:
    """(ROWS, PLACES, WIDE) output gradients of one record in many rows, which cancel over its places."""
    return cancelling(WIDE, PLACES).t()[:, None].expand(PLACES, ROWS, WIDE).contiguous().transpose(0, 1)


def kinds(layer: nn.Module) -> int:
    """Of a bias's gradients."""
    g = place_after_place()
    x = torch.ones(ROWS, PLACES, WIDE)
    if isinstance(layer, nn.Conv1d):
        g, x = g.transpose(1, 2), x.transpose(1, 2)
    return len(rules.pieces(layer, x, g)["bias"].dense().unique(dim=0))


LAYERS = [nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Conv1d(WIDE, WIDE, 1)]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_bias_s_gradient_does_not_depend_on_the_row(layer: nn.Module) -> None:
    assert kinds(layer) == 1


def test_places_before_records_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin adds up gradients as they lie; not every processor minds."""
    if len(place_after_place().sum(1).unique(dim=0)) == 1:
        pytest.skip("this processor adds up all columns alike")
    monkeypatch.setattr(rules, "_by_record", lambda g: g)
    assert min(kinds(layer) for layer in LAYERS) > 1


class OverPlaces(nn.Module):
    """Adds up places, which come after the records or before them."""

    def __init__(self, *, before: bool) -> None:
        super().__init__()
        self.mix, self.before = nn.Linear(4, 3), before

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.mix(x)
        if self.before:
            found = found.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
        return found.sum(1)


@pytest.mark.parametrize("before", [True, False])
def test_a_model_that_adds_up_across_records_needs_more_rows(before: bool) -> None:
    model, x = OverPlaces(before=before), torch.rand(2, 5, 4)
    seen = operations(model, dict(model.named_parameters()), lambda out, _: out.sum(1), x, x)
    assert (seen <= ALIKE) is not before


class Views(nn.Module):
    """Something of a record's views, which come before the records."""

    def __init__(self, of_views: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.of_views = nn.Linear(4, PLACES * 3), of_views
        with torch.no_grad():
            self.make.weight.zero_()
            self.make.bias.copy_(cancelling(3, PLACES).t().flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.of_views(torch.stack(self.make(x).view(-1, PLACES, 3).unbind(1)))


OF_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda views: views.mean(0),
    "sum": lambda views: views.sum(0),
    "log-softmax": lambda views: (views / 2**20).log_softmax(0).sum(0),
    "logsumexp": lambda views: (views / 2**20).logsumexp(0),
    "product": lambda views: torch.einsum("vbf,v->bf", views, torch.ones(PLACES)),
}


def norms_of_views(name: str) -> Tensor:
    """Of one record in all rows of batches of several sizes."""
    clipped, x = Clipper(Views(OF_VIEWS[name])), torch.zeros(100, 4)
    return torch.cat([clipped(squares, x[:n], x[:n], Flat(1.0)).norms for n in (17, 20, 33, 100)])


@pytest.mark.parametrize("name", OF_VIEWS)
def test_what_is_made_of_views_does_not_depend_on_the_row(name: str) -> None:
    assert len(norms_of_views(name).unique()) == 1


def test_views_that_nobody_looks_at_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin fills up as if records came first; not every processor minds."""
    raw = Views(OF_VIEWS["sum"])(torch.zeros(20, 4))
    if len(raw.unique(dim=0)) == 1:
        pytest.skip("this processor adds up all columns alike")
    monkeypatch.setattr(row_steps, "_across", lambda *_: False)
    assert len(norms_of_views("sum").unique()) > 1
