"""An account knows records of every kind again, and tells those apart that differ."""

from __future__ import annotations

import numpy as np
import pytest

from modicum.data.arrays import Arrays
from modicum.data.digests import as_table
from modicum.privacy.lifetime.spending import by_contents

KEY = b"k" * 16
X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Arrays(X, np.array([0.25, 0.5])), Arrays(X, np.array([0.25, 0.75]))),  # numbers that are no classes
        (Arrays(X, np.array([[0, 1], [1, 1]])), Arrays(X, np.array([[0, 1], [1, 0]]))),
        (Arrays({"a": X, "b": X > 1}, np.array([0, 1])), Arrays({"a": X, "b": X < 1}, np.array([0, 1]))),
        (Arrays(X.astype(int) + 2**25, np.array([0, 1])), Arrays(X.astype(int) + 2**25 + 1, np.array([0, 1]))),
    ],
)
def test_records_that_differ_are_told_apart(one: Arrays, other: Arrays) -> None:
    mine, again, others = (by_contents(KEY, [as_table(part)]) for part in (one, one, other))
    assert np.array_equal(mine, again)
    assert not np.array_equal(mine, others)


def test_cut_to_whole_numbers_they_would_be_one() -> None:
    """The negative control: labels taken as classes make two people of one age group the same."""
    y = np.array([0.25, 0.75])
    blunt = by_contents(KEY, [(X, y.astype(np.int64))])
    assert len(blunt) == 1
    assert len(by_contents(KEY, [as_table(Arrays(X, y))])) == 2


def test_plain_records_are_known_as_before() -> None:
    plain = Arrays(X, np.array([0, 1]))
    assert np.array_equal(by_contents(KEY, [as_table(plain)]), by_contents(KEY, [(X, np.array([0, 1]))]))
