from __future__ import annotations

import math
from collections import Counter

import pytest

from modicum.data import assign_budgets, parse_budgets
from modicum.errors import UserError


def test_one_for_all() -> None:
    assert assign_budgets(1, 3) == (1.0, 1.0, 1.0)
    assert assign_budgets(math.inf, 2) == (math.inf, math.inf)


def test_a_list_is_dealt_in_turn() -> None:
    assert assign_budgets([0.5, 1, 8], 5) == (0.5, 1.0, 8.0, 0.5, 1.0)
    assert assign_budgets([0.5, 1, 8], 3) == (0.5, 1.0, 8.0)


def test_weights_give_exact_counts_in_an_order_of_the_seed() -> None:
    weights = {0.05: 0.6, 0.1: 0.3, 1.0: 0.1}
    dealt = assign_budgets(weights, 50, seed=1)
    assert Counter(dealt) == {0.05: 30, 0.1: 15, 1.0: 5}
    assert dealt == assign_budgets(weights, 50, seed=1)
    assert dealt != assign_budgets(weights, 50, seed=2)
    assert Counter(assign_budgets(weights, 4)) == {0.05: 3, 0.1: 1}  # 2.4, 1.2, 0.4


@pytest.mark.parametrize(
    "bad",
    [0, -1, math.nan, True, [], [1.0, 0.0], [1.0] * 6, {0.0: 1.0}, {1.0: -1.0}, {1.0: 0.0}, {1.0: math.nan}, "x"],
)
def test_bad_budgets(bad: object) -> None:
    with pytest.raises(UserError):
        assign_budgets(bad, 5)  # type: ignore[arg-type]


def test_text() -> None:
    assert parse_budgets("1") == 1.0
    assert parse_budgets("inf") == math.inf
    assert parse_budgets("0.5, 1,8") == [0.5, 1.0, 8.0]
    assert parse_budgets("0.05:0.6,0.1:0.3,1:0.1") == {0.05: 0.6, 0.1: 0.3, 1.0: 0.1}
    assert assign_budgets("0.5,1", 3) == (0.5, 1.0, 0.5)


@pytest.mark.parametrize("text", ["", "one", "1,", "1:2,3", "1:2:3", "1:0.5,1:0.5"])
def test_bad_text(text: str) -> None:
    with pytest.raises(UserError, match="cannot read the budgets"):
        parse_budgets(text)
