"""A token or a label that the model does not have: the record counts as zero, and nobody else notices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from modicum.compute import Clipper, Flat
from modicum.compute.clipping import clipped_sum
from modicum.compute.clipping.ranges import IGNORED, Range, ranges

WORDS, CLASSES, LONG, BATCH = 11, 3, 5, 6


class Words(nn.Module):
    """Looks words up; classifies each text, or each place of it."""

    def __init__(self, every: bool) -> None:
        super().__init__()
        self.every, self.words = every, nn.Embedding(WORDS, 8)
        self.out = nn.Linear(8, WORDS if every else CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.words(x)
        return self.out(found if self.every else found.mean(1))


def by_text(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, reduction="none")


def by_place(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).sum(1)


def batch(every: bool) -> tuple[Words, Tensor, Tensor]:
    torch.manual_seed(0)
    y = torch.randint(WORDS, (BATCH, LONG)) if every else torch.randint(CLASSES, (BATCH,))
    return Words(every), torch.randint(WORDS, (BATCH, LONG)), y


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("what", ["inputs", "targets"])
@pytest.mark.parametrize("number", [WORDS, -1, -7, 2**40])
def test_a_number_out_of_range_counts_as_zero_for_its_record_alone(every: bool, what: str, number: int) -> None:
    model, x, y = batch(every)
    loss, clipper, row = by_place if every else by_text, Clipper(model), 2
    blank = clipper(loss, x, y, Flat(1.0), weights=torch.ones(BATCH).index_fill(0, torch.tensor(row), 0.0))
    (x if what == "inputs" else y).view(BATCH, -1)[row, -1] = number
    found = clipper(loss, x, y, Flat(1.0))
    for name, total in found.total.items():
        assert torch.equal(total, blank.total[name])
    others = torch.arange(BATCH) != row
    assert torch.equal(found.norms[others], blank.norms[others])
    assert found.norms[row] == 0


def test_labels_that_a_loss_leaves_out_are_no_mistakes() -> None:
    model, x, y = batch(True)
    y[1, 2:] = IGNORED
    found = Clipper(model)(by_place, x, y, Flat(1e9))
    assert found.norms[1] > 0


def test_ranges_are_of_models_and_losses_and_read_no_record() -> None:
    model, x, y = batch(False)
    assert ranges(model, by_text, x, y) == (Range(0, WORDS), Range(1, CLASSES, (IGNORED,)))
    linear, rows = nn.Linear(4, CLASSES), torch.rand(BATCH, 4)

    def squares(outputs: Tensor, y: Tensor) -> Tensor:
        return mse_loss(outputs[:, 0], y.float(), reduction="none")

    def several(outputs: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(outputs, y.float(), reduction="none").sum(1)

    assert ranges(linear, squares, rows, y) == ()  # any whole number is one to regress on
    assert ranges(linear, several, rows, torch.ones(BATCH, CLASSES, dtype=torch.long)) == ()


def test_without_ranges_one_record_decides_over_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(clipped_sum, "within", lambda problem, _known: (problem, None))
    model, x, y = batch(False)
    y[2] = CLASSES
    with pytest.raises(IndexError):
        Clipper(model)(by_text, x, y, Flat(1.0))
