"""Batches are filled up only as far as a model's operations ask for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat, problem
from modicum.compute.problem import FEW, FEWEST, ROWS, enough_rows, few_rows
from modicum.compute.row_steps import UNKNOWN, Operations, operations, row_step
from modicum.models import build
from tests.compute.helpers import cross_entropy
from tests.compute.test_bound import threads


def step_of(model: nn.Module, *shape: int, loss: Callable[..., Tensor] = cross_entropy) -> int:
    x, y = torch.rand(3, *shape), torch.tensor([0, 1, 2])
    return row_step(Operations(model)(dict(model.named_parameters()), loss, lambda: (x, y)))


@pytest.mark.parametrize(
    ("name", "shape"), [("logistic", (4,)), ("mlp", (4,)), ("cnn-small", (1, 28, 28)), ("resnet18", (3, 8, 8))]
)
def test_shipped_models_need_few_rows(name: str, shape: tuple[int, ...]) -> None:
    assert step_of(build(name, shape, 3, seed=0), *shape) == few_rows()


@pytest.mark.parametrize(("maker", "step"), [("AuthenticAMD", FEW), ("GenuineIntel", FEW), ("", ROWS)])
def test_few_rows_are_for_processors_that_were_searched(
    maker: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem, "maker_of_processor", lambda: maker)
    assert few_rows() == step


class Threads(nn.Module):
    """Notes how many threads its passes have."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.linear, self.seen = function, nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.get_num_threads()
        output: Tensor = self.linear(self.function(x))
        return output


@pytest.mark.parametrize(
    ("maker", "function", "most"),
    [
        ("AuthenticAMD", torch.tanh, 2),
        ("AuthenticAMD", torch.sigmoid, 1),  # threads share a tensor at places that end in no register
        ("GenuineIntel", torch.tanh, 1),
        ("", torch.tanh, 1),
    ],
)
@pytest.mark.parametrize("limited", [True, False])
def test_sums_have_no_more_threads_than_were_searched(
    maker: str, function: Callable[[Tensor], Tensor], most: int, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin leaves the process all threads that it has."""
    monkeypatch.setattr(problem, "maker_of_processor", lambda: maker)
    if not limited:
        monkeypatch.setattr(import_module("modicum.compute.clipped_sum"), "most_threads", lambda **_: 8)
    model = Threads(function)
    with threads(4):
        Clipper(model)(cross_entropy, torch.randn(6, 4), torch.arange(6) % 3, Flat(1.0))
        assert (model.seen == most) is limited
        assert torch.get_num_threads() == 4


class Hidden(torch.autograd.Function):
    """A sigmoid that only the backward pass shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.sigmoid(ctx.saved_tensors[0])


class Wrapped(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 5), nn.Linear(5, 3), between

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.between(self.first(x)))
        return found


@pytest.mark.parametrize("between", [torch.sigmoid, nn.functional.silu, Hidden.apply, nn.functional.softplus])
def test_operations_that_treat_a_tensors_end_otherwise_are_seen(between: Callable[[Tensor], Tensor]) -> None:
    assert step_of(Wrapped(between), 4) == ROWS


def test_so_are_those_of_the_loss() -> None:
    def logistic(outputs: Tensor, y: Tensor) -> Tensor:
        target = nn.functional.one_hot(y, 3).float()
        return nn.functional.binary_cross_entropy_with_logits(outputs, target, reduction="none").sum(1)

    assert step_of(build("mlp", (4,), 3, seed=0), 4, loss=logistic) == ROWS


def test_what_cannot_be_run_is_unknown() -> None:
    model = nn.Linear(4, 3)
    found = operations(model, dict(model.named_parameters()), cross_entropy, torch.rand(2, 5), torch.zeros(2))
    assert found == UNKNOWN


def test_records_do_not_decide() -> None:
    """A model that looks at its records and takes another way for large ones: own numbers are looked at."""
    model = Wrapped(lambda h: torch.sigmoid(h) if bool(h.abs().max() > 1e6) else h)
    x, y = torch.rand(3, 4), torch.tensor([0, 1, 2])
    trained = dict(model.named_parameters())
    small, large = (Operations(model)(trained, cross_entropy, lambda x=x: (x, y)) for x in (x, 1e9 * x))
    assert small == large != UNKNOWN


def movement(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """What the last record moves the others' norms by, at most; nothing, it should be."""
    clipper = Clipper(model)
    whole, rest = (clipper(cross_entropy, x[:n], y[:n], Flat(1.0)).norms for n in (len(x), len(x) - 1))
    return float((whole[:-1] - rest).abs().max())


@pytest.mark.parametrize("known", [True, False])
def test_a_sigmoid_needs_whole_registers(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin believes that a sigmoid computes each number in one way, and fills up too little."""
    if not known:
        module = import_module("modicum.compute.row_steps")
        monkeypatch.setattr(module, "ALIKE", module.ALIKE | {"sigmoid", "sigmoid_backward"})
        monkeypatch.setattr(problem, "maker_of_processor", lambda: "AuthenticAMD")  # others fill up to 32 rows
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), nn.Linear(5, 3))
    moved = max(movement(model, 3 * torch.randn(17, 5), torch.arange(17) % 3) for _ in range(60))
    assert (moved == 0) is known


def test_sizes() -> None:
    assert [enough_rows(n, FEW) for n in (0, 1, 16, 17, 130)] == [0, FEWEST, 16, 20, 132]
    assert [enough_rows(n) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
