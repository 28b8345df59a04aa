from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.data import Dirichlet, Iid, Natural, Shards, SizeSkew, load, parse_partition
from modicum.data.partition import apportion
from modicum.errors import UserError

DIGITS = load("digits").train.y


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    classes = draw(st.integers(2, 8))
    clients = draw(st.integers(2, 8))
    # Enough records for four one-class shards each, and for draws of Dirichlet(0.3) that leave nobody out.
    n = draw(st.integers(100, 250))
    labels = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, classes, n)
    return labels, clients, draw(st.integers(0, 2**32))


PARTITIONS = [
    Iid(),
    Dirichlet(1.0, min_records=1),
    Dirichlet(0.3, min_records=2),
    Shards(4),
    SizeSkew(1),
    SizeSkew(50),
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_every_record_is_used_once_and_no_client_is_empty(
    partition: object, case: tuple[np.ndarray, int, int]
) -> None:
    labels, clients, seed = case
    parts = partition.split(labels, clients, np.random.default_rng(seed))  # type: ignore[attr-defined]
    assert len(parts) == clients
    assert min(len(p) for p in parts) >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    again = partition.split(labels, clients, np.random.default_rng(seed))  # type: ignore[attr-defined]
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.5), Shards(2), SizeSkew(10)], ids=str)
def test_seeds_differ_and_none_needs_an_error_on_real_labels(partition: object) -> None:
    a, b = (partition.split(DIGITS, 20, np.random.default_rng(seed)) for seed in (0, 1))  # type: ignore[attr-defined]
    assert any(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _distance(parts: list[np.ndarray]) -> float:
    """Mean total-variation distance between a client's classes and everybody's."""
    overall = np.bincount(DIGITS, minlength=10) / len(DIGITS)
    own = [np.bincount(DIGITS[p], minlength=10) / len(p) for p in parts]
    return float(np.mean([np.abs(o - overall).sum() / 2 for o in own]))


def test_a_smaller_alpha_is_further_from_iid() -> None:
    rng = np.random.default_rng(0)
    distances = [_distance(Dirichlet(a, min_records=1).split(DIGITS, 10, rng)) for a in (100.0, 1.0, 0.1)]
    assert distances[0] < 0.1 < distances[1] < distances[2]
    assert distances[2] > 0.5


@pytest.mark.parametrize("per_client", [1, 2, 4])
def test_shards_give_each_client_exactly_that_many_classes(per_client: int) -> None:
    parts = Shards(per_client).split(DIGITS, 20, np.random.default_rng(3))
    assert [len(np.unique(DIGITS[p])) for p in parts] == [per_client] * 20
    sizes = [len(p) for p in parts]
    assert max(sizes) <= 1.2 * min(sizes)


def test_shards_of_very_unequal_classes_stay_within_the_limit() -> None:
    labels = np.repeat([0, 1, 2], [900, 50, 3])
    parts = Shards(2).split(labels, 30, np.random.default_rng(0))
    assert max(len(np.unique(labels[p])) for p in parts) <= 2
    assert sum(len(p) for p in parts) == 953


def test_size_skew_keeps_the_labels_and_skews_the_sizes() -> None:
    parts = SizeSkew(10).split(DIGITS, 10, np.random.default_rng(0))
    sizes = np.array([len(p) for p in parts])
    assert sizes.max() / sizes.min() == pytest.approx(10, rel=0.1)
    overall = np.bincount(DIGITS) / len(DIGITS)
    for p in parts:
        assert np.abs(np.bincount(DIGITS[p], minlength=10) - overall * len(p)).max() < 2.01


def test_natural_follows_the_groups() -> None:
    groups = np.array([0, 1, 1, 2])
    parts = Natural(groups).split(np.zeros(4), 3, np.random.default_rng(0))
    assert [p.tolist() for p in parts] == [[0], [1, 2], [3]]


@pytest.mark.parametrize(
    ("partition", "clients", "message"),
    [
        (Iid(), 2000, "take fewer clients"),
        (Iid(), 0, "at least 1"),
        (Dirichlet(0.001), 20, "raise alpha"),
        (Dirichlet(0.5), 1000, "take fewer clients"),
        (Shards(1), 5, "cannot hold 10 classes"),
        (Natural(), 4, "no natural clients"),
        (Natural(np.zeros(1438, int)), 4, "1 natural clients, not 4"),
    ],
)
def test_impossible_divisions_say_what_to_change(partition: object, clients: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        partition.split(DIGITS, clients, np.random.default_rng(0))  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.5", "shards:2", "size-skew:10", "natural"])
def test_partitions_can_be_written_and_read(text: str) -> None:
    assert str(parse_partition(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "iid:3", "dirichlet:x", "dirichlet:-1", "dirichlet:nan", "shards:1.5", "shards:0", "size-skew:0.1", "?"],
)
def test_bad_partitions(text: str) -> None:
    with pytest.raises(UserError):
        parse_partition(text)


@given(total=st.integers(0, 500), shares=st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_apportioned_counts_are_nearest(total: int, shares: list[float]) -> None:
    counts = apportion(total, np.array(shares))
    exact = np.array(shares) / sum(shares) * total
    assert counts.sum() == total
    assert np.abs(counts - exact).max() < 1 + 1e-9
