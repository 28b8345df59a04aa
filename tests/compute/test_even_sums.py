"""Records that lie side by side in memory, place after place: what is added up of one is the same in any row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import rules
from modicum.compute.row_steps import ALIKE, operations
from tests.compute.test_even_products import cancelling

ROWS, PLACES, WIDE = 20, 12, 13


def kinds(layer: nn.Module) -> int:
    """Of a bias's gradients of one record in many rows, whose terms cancel over its places."""
    g = cancelling(WIDE, PLACES).t()[:, None].expand(PLACES, ROWS, WIDE).contiguous().transpose(0, 1)
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
    monkeypatch.setattr(rules, "_by_record", lambda g: g)
    found = [kinds(layer) for layer in LAYERS]
    if max(found) == 1:
        pytest.skip("this processor adds up all columns alike")
    assert min(found) > 1


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
