"""A token or a label that the model does not have: the record counts as zero, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, embedding, mse_loss

from modicum.compute import Clipper, Flat
from modicum.compute.clipping import clipped_sum
from modicum.compute.clipping.clipped_sum import Route
from modicum.compute.clipping.loop import LoopBackend
from modicum.compute.clipping.ranges import IGNORED, Range, ranges
from tests.compute.slot_models import Through

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
    assert ranges(model, by_text, x, y) == (Range(1, CLASSES, (IGNORED,)),)
    linear, rows = nn.Linear(4, CLASSES), torch.rand(BATCH, 4)

    def squares(outputs: Tensor, y: Tensor) -> Tensor:
        return mse_loss(outputs[:, 0], y.float(), reduction="none")

    def several(outputs: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(outputs, y.float(), reduction="none").sum(1)

    assert ranges(linear, squares, rows, y) == ()  # any whole number is one to regress on
    assert ranges(linear, several, rows, torch.ones(BATCH, CLASSES, dtype=torch.long)) == ()


def cast(s: Any, x: Tensor) -> Tensor:
    found: Tensor = s.o(s.e(x.long()).mean(1))
    return found


def columns(s: Any, x: Tensor) -> Tensor:
    found: Tensor = s.o(s.e(x[:, 0]) + s.few(x[:, 1]))
    return found


def bare(s: Any, x: Tensor) -> Tensor:
    found: Tensor = s.o(embedding(x, s.e.weight).mean(1))
    return found


LOOKED_UP: dict[str, Callable[[], nn.Module]] = {
    "cast": lambda: Through(cast, e=nn.Embedding(WORDS, 8), o=nn.Linear(8, CLASSES)),
    "a bag": lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8), nn.Linear(8, CLASSES)),
    "a column each": lambda: Through(
        columns, e=nn.Embedding(WORDS, 8), few=nn.Embedding(CLASSES, 8), o=nn.Linear(8, CLASSES)
    ),
    "no layer": lambda: Through(bare, e=nn.Embedding(WORDS, 8), o=nn.Linear(8, CLASSES)),
}


@pytest.mark.parametrize("name", list(LOOKED_UP))
@pytest.mark.filterwarnings("ignore")
def test_however_a_model_looks_numbers_up_one_record_fails_alone(name: str) -> None:
    torch.manual_seed(0)
    model, row = LOOKED_UP[name](), 2
    x = torch.randint(CLASSES, (BATCH, LONG), dtype=torch.int32 if name == "cast" else torch.int64)
    y, clipper = torch.randint(CLASSES, (BATCH,)), Clipper(model)
    blank = clipper(by_text, x, y, Flat(1.0), weights=torch.ones(BATCH).index_fill(0, torch.tensor(row), 0.0))
    for number in (WORDS, -1, torch.iinfo(x.dtype).max):
        x[row, 1 if name == "a column each" else -1] = number
        found = clipper(by_text, x, y, Flat(1.0))
        assert all(torch.equal(total, blank.total[n]) for n, total in found.total.items())
        assert found.norms[row] == 0
    assert Route.ALONE in clipper.routes.popitem()[1].values() or name != "no layer"


class Places(nn.Embedding):
    """As some models have it: given the words, it looks up their places, of which there are fewer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.arange(x.shape[1]).expand(x.shape))


class Scaled(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 4


@pytest.mark.filterwarnings("ignore::modicum.compute.SlowClippingWarning")
def test_an_embedding_of_places_does_not_mind_what_the_words_are() -> None:
    torch.manual_seed(0)
    model = Through(
        lambda s, x: s.o((s.e(x) + s.p(x)).mean(1)), e=Scaled(WORDS, 8), p=Places(LONG, 8), o=nn.Linear(8, 3)
    )
    x, y, clipper = torch.randint(LONG, WORDS, (BATCH, LONG)), torch.arange(BATCH) % 3, Clipper(model)
    norms = clipper(by_text, x, y, Flat(1.0)).norms
    assert (norms > 0).all()
    x[2, 0] = WORDS
    expected = norms * (torch.arange(BATCH) != 2)
    assert torch.equal(clipper(by_text, x, y, Flat(1.0)).norms, expected)


def test_each_column_has_the_range_of_its_own_embedding() -> None:
    torch.manual_seed(0)
    x = torch.stack([torch.arange(BATCH) % WORDS, torch.arange(BATCH) % CLASSES], 1)
    x[0, 0] = WORDS - 1  # more than the other column has
    found = Clipper(LOOKED_UP["a column each"]())(by_text, x, torch.zeros(BATCH, dtype=torch.long), Flat(1.0))
    assert (found.norms > 0).all()


def test_without_safe_lookups_one_record_decides_over_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(clipped_sum, "safe_lookups", lambda _: nullcontext())
    monkeypatch.setattr(clipped_sum, "fails", lambda *_: "")
    model, x, y = batch(False)
    x[2, 0] = WORDS
    with pytest.raises(IndexError):
        Clipper(model)(by_text, x, y, Flat(1.0))


def test_outputs_of_a_record_that_is_out_of_range_are_no_numbers() -> None:
    model, x, _ = batch(False)
    x[2, 0] = WORDS
    backend = LoopBackend(model)
    found = backend.outputs(torch.cat([p.detach().flatten() for p in model.parameters()]), x)
    assert found[2].isnan().all()
    assert found[torch.arange(BATCH) != 2].isfinite().all()


def test_without_ranges_one_record_decides_over_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(clipped_sum, "within", lambda problem, _known: (problem, None))
    model, x, y = batch(False)
    y[2] = CLASSES
    with pytest.raises(IndexError):
        Clipper(model)(by_text, x, y, Flat(1.0))
