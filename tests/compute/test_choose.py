from __future__ import annotations

import pytest
from torch import nn

from modicum.compute import Way
from modicum.compute.client_batched.choose import choose
from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping.loop import LoopBackend
from modicum.models import build


@pytest.mark.parametrize(
    ("name", "device", "fused"),
    [
        ("logistic", "cpu", True),
        ("mlp", "cpu", True),
        ("cnn-small", "cpu", False),
        ("cnn-small", "cuda", True),
        ("resnet18", "cuda", False),
    ],
)
def test_small_models_are_stacked(name: str, device: str, fused: bool) -> None:
    shape = (3, 32, 32) if name == "resnet18" else (1, 28, 28)
    choice = choose(build(name, shape, 10, seed=0), device)
    assert isinstance(choice.backend, FusedBackend if fused else LoopBackend)
    assert (choice.at_once > 1) is fused


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_draws_client_by_client(p: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.Linear(4, 2))
    assert isinstance(choose(model).backend, LoopBackend if p else FusedBackend)


def test_compiled_sums_are_asked_for_and_come_client_by_client() -> None:
    choice = choose(build("mlp", (4,), 3, seed=0), compiled=True)
    assert isinstance(choice.backend, LoopBackend)
    assert choice.backend.way is Way.COMPILED
    assert choice.at_once == 1


def test_a_stack_on_a_cpu_stays_in_the_cache() -> None:
    wide, narrow = nn.Linear(1000, 100), nn.Linear(10, 10)
    assert choose(wide).at_once < choose(narrow).at_once
