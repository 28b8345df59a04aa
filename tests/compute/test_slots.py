"""The search of (c′): what it catches, and that it finds nothing in models of all kinds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.compute.slot_models import BROKEN, MODELS
from tests.compute.slots import Count, has_matrix_units, is_caught, search

TOGETHER = 120
"""Seconds of the long search with each number of threads."""


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_models_are_caught(name: str) -> None:
    assert is_caught(name, "cpu")


@pytest.mark.skipif(not has_matrix_units(), reason="of Intel's matrix units alone")
def test_half_precision_on_matrix_units_is_caught() -> None:
    count = Count()
    for name in ("784-64-10", "images"):
        search(name, MODELS[name], "cpu", count, half=True, sums=False, rows=(8, 31))
    assert count.differ


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        ("linear 30-3", 1),
        ("linear 30-3", 2),
        ("small bert", 1),
        ("images", 1),
        pytest.param("small bert", 2, marks=pytest.mark.heavy),
    ],
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_other_rows_keep_their_bits(name: str) -> None:
    count = Count()
    search(name, MODELS[name], "cpu", count, rows=(3, 13))
    assert (count.differ, count.unsteady) == ([], [])
    assert count.worlds == 2 * 2 * 3 * 6


@pytest.mark.soak
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.filterwarnings("ignore::modicum.compute.SlowClippingWarning")
@pytest.mark.usefixtures("threads")
def test_other_rows_keep_their_bits_in_a_long_search(name: str) -> None:
    count = Count()
    search(name, MODELS[name], "cpu", count, until=time.monotonic() + TOGETHER / len(MODELS))
    assert (count.differ, count.unsteady) == ([], [])
    assert count.worlds
