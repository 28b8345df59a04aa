"""A look's query: every record's part is bounded, whatever it holds; in order, sums are right."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from modicum.core.parts import Batch
from modicum.core.statistics import ASKED, HISTOGRAMS, MEANS, MISSING, PRODUCTS, Questions
from modicum.errors import UserError
from modicum.mechanisms.statistics import sums_of


def record_sums(x: Tensor, y: Tensor, asked: Questions) -> dict[str, Tensor]:
    return sums_of(Batch(x, {"y": y}), asked, persons=False)


def person_sums(x: Tensor, classes: Sequence[int], there: Sequence[int]) -> dict[str, Tensor]:
    """Of one person with these rows, some of which may be blanks."""
    y = torch.tensor([[[t, c] for t, c in zip(there, classes, strict=True)]])
    return sums_of(Batch(x[None], {"y": y}), EVERYTHING, persons=True)


EVERYTHING = Questions(tuple(ASKED), bins=4, classes=3, columns=5)
HOSTILE = torch.tensor(
    [
        [math.nan, math.inf, -math.inf, 1e30, -1e30],
        [2.0, 5.0, 1.0, 0.0, 1e300],
        [0.0, 1.0, 0.0, 1.0, 0.0],
        [-1.0, -1.0, -1.0, -1.0, -1.0],
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.5, 0.5, 0.5, 0.5, 0.5],
    ]
)


@pytest.mark.parametrize("row", range(len(HOSTILE)))
def test_no_record_is_longer_than_its_bound(row: int) -> None:
    found = record_sums(HOSTILE[row : row + 1], torch.tensor([2]), EVERYTHING)
    for name, block in EVERYTHING.blocks.items():
        assert found[name].numel() == block.size
        assert float(found[name].norm()) <= block.bound * (1 + 1e-12)


def test_some_record_reaches_each_bound_so_that_a_smaller_one_would_be_caught() -> None:
    reached = dict.fromkeys(EVERYTHING.blocks, 0.0)
    for row in HOSTILE.split(1):
        for name, value in record_sums(row, torch.tensor([0]), EVERYTHING).items():
            reached[name] = max(reached[name], float(value.norm()))
    assert reached == pytest.approx({name: block.bound for name, block in EVERYTHING.blocks.items()})


def test_sums_are_those_of_the_records() -> None:
    x = torch.tensor([[0.0, 0.5], [1.0, -1.0], [0.75, 0.25]])
    asked = Questions(tuple(ASKED), bins=2, classes=2, columns=2)
    found = record_sums(x, torch.tensor([0, 1, 1]), asked)
    assert found["classes"].tolist() == [1, 2]
    assert found[MISSING].tolist() == [0, 1]
    assert found[MEANS].tolist() == [0.5, -0.5]
    assert found[HISTOGRAMS].tolist() == [1, 2, 1, 1]
    assert found[PRODUCTS].tolist() == [-0.25]


def test_a_person_is_the_mean_of_the_rows_that_are_there() -> None:
    """However many they are, and whatever stands in blanks."""
    rows, classes = HOSTILE[[1, 4, 2]], [2, 0, 1]
    found = person_sums(HOSTILE[[1, 4, 2, 0]], [*classes, 0], [1, 1, 1, 0])
    each = [record_sums(row, torch.tensor([c]), EVERYTHING) for row, c in zip(rows.split(1), classes, strict=True)]
    for name in EVERYTHING.blocks:
        torch.testing.assert_close(found[name], sum(one[name] for one in each) / 3)
    alone = person_sums(HOSTILE[[1, 0, 0, 0]], [2, 0, 0, 0], [1, 0, 0, 0])
    for name, value in record_sums(HOSTILE[1:2], torch.tensor([2]), EVERYTHING).items():
        assert torch.equal(alone[name], value)
    assert all(float(v.norm()) == 0 for v in person_sums(HOSTILE[:4], [0] * 4, [0] * 4).values())


def test_no_person_is_longer_than_the_bound_of_a_row() -> None:
    """Rows that are all alike reach it; were they added up, as records are, they would pass it."""
    alike, classes = HOSTILE[[4] * 6], [2] * 6
    as_records = record_sums(alike, torch.tensor(classes), EVERYTHING)
    passed = set()
    for name, value in person_sums(alike, classes, [1] * 6).items():
        assert float(value.norm()) <= EVERYTHING.blocks[name].bound * (1 + 1e-12)
        if float(as_records[name].norm()) > EVERYTHING.blocks[name].bound * (1 + 1e-12):
            passed.add(name)
    assert passed == set(EVERYTHING.blocks) - {MISSING}  # nothing is missing in these rows


def test_the_number_of_answers_says_how_many_columns() -> None:
    assert Questions.of_size(EVERYTHING.asked, 4, 3, EVERYTHING.size) == EVERYTHING
    with pytest.raises(UserError, match="no look of"):
        Questions.of_size(EVERYTHING.asked, 4, 3, EVERYTHING.size + 1)
