"""A look's query: every record's part is bounded, whatever it holds; in order, sums are right."""

from __future__ import annotations

import math

import pytest
import torch

from modicum.core.statistics import ASKED, HISTOGRAMS, MEANS, MISSING, PRODUCTS, Questions
from modicum.errors import UserError
from modicum.mechanisms.statistics import record_sums

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


def test_the_number_of_answers_says_how_many_columns() -> None:
    assert Questions.of_size(EVERYTHING.asked, 4, 3, EVERYTHING.size) == EVERYTHING
    with pytest.raises(UserError, match="no look of"):
        Questions.of_size(EVERYTHING.asked, 4, 3, EVERYTHING.size + 1)
