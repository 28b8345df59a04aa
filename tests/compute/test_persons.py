"""Persons of several rows: joined before anything is clipped, on the fast path, missing rows left alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Flat, clipped_sum
from modicum.compute.clipping import bookkeeping
from modicum.compute.clipping.clipped_sum import SlowClippingWarning
from modicum.core.persons import Slot, taking_persons
from modicum.tasks import classification, regression
from modicum.tasks.persons import of_persons

ROWS, PERSONS = 3, 7


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.words(x)).mean(1))
        return found


class Own(nn.Module):
    """A parameter without a rule inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(_Scale(), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def images() -> nn.Module:
    conv = nn.Conv2d(2, 4, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)), (5,)),
    "images": (images, (2, 5, 5)),
    "words": (Words, (6,)),
    "own": (Own, (5,)),
}


def batch(shape: tuple[int, ...], *, words: bool = False) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(0, 11, (PERSONS, ROWS, *shape), generator=drawn) if words else None
    x = torch.randn((PERSONS, ROWS, *shape), generator=drawn) if x is None else x
    y = torch.randint(0, 4, (PERSONS, ROWS, 1), generator=drawn)
    there = torch.rand((PERSONS, ROWS, 1), generator=drawn) < 0.6
    there[:, 0] = True
    return x, torch.cat([there.long(), y], 2)


def by_hand(model: nn.Module, x: Tensor, y: Tensor, bound: float, *, summed: bool) -> tuple[list[Tensor], Tensor]:
    """One person after another by autograd, on the rows that are there alone."""
    total, norms = [torch.zeros_like(p) for p in model.parameters()], []
    for person in range(len(x)):
        kept = y[person, :, 0] > 0
        losses = nn.functional.cross_entropy(model(x[person][kept]), y[person, kept, 1], reduction="none")
        grads = torch.autograd.grad(losses.sum() if summed else losses.mean(), list(model.parameters()))
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
        norms.append(norm)
        for t, g in zip(total, grads, strict=True):
            t += (bound / norm).clamp(max=1.0).float() * g
    return total, torch.stack(norms)


@pytest.fixture(autouse=True)
def slow_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowClippingWarning)
        yield


@pytest.mark.parametrize("summed", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_a_persons_rows_are_joined_and_clipped_once(name: str, summed: bool) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, (x, y) = make(), batch(shape, words=name == "words")
    bound = 0.4
    total, norms = by_hand(model, x, y, bound, summed=summed)
    task = of_persons(classification(), summed=summed)
    found = clipped_sum(taking_persons(model, Slot(ROWS)), task.losses, x, y, Flat(bound))
    torch.testing.assert_close(found.norms.double(), norms, rtol=1e-4, atol=1e-6)
    for mine, truth in zip(found.total.values(), total, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_row_may_hold_anything(name: str) -> None:
    """The same bits, whatever stands where no row is."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, (x, y) = taking_persons(make(), Slot(ROWS)), batch(shape, words=name == "words")
    task = of_persons(classification(), summed=False)
    missing = y[..., 0] == 0
    other = x.clone()
    other[missing] = 3
    one, two = (clipped_sum(model, task.losses, t, y, Flat(0.4)) for t in (x, other))
    assert torch.equal(one.norms, two.norms)
    assert all(torch.equal(a, b) for a, b in zip(one.total.values(), two.total.values(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_no_person_moves_a_sum_beyond_its_bound(name: str) -> None:
    """All of a person's rows are the same and huge; a sum that is clipped by row moves by as many bounds."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, (x, y) = taking_persons(make(), Slot(ROWS)), batch(shape, words=name == "words")
    y[0, :, 0], y[0, :, 1] = 1, 2
    x[0] = x[0, :1] if name == "words" else 100.0
    task, bound = of_persons(classification(), summed=True), 0.1
    blank = torch.ones(PERSONS)
    blank[0] = 0
    with_, without = (clipped_sum(model, task.losses, x, y, Flat(bound), weights=w) for w in (None, blank))
    assert _moved(with_.total, without.total) <= bound * (1 + 1e-3)
    assert _by_row(model, x[0], y[0], bound) > 1.5 * bound  # the broken one


def _moved(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.stack([(one[n] - other[n]).double().square().sum() for n in one]).sum().sqrt())


def _by_row(model: nn.Module, x: Tensor, y: Tensor, bound: float) -> float:
    """How far one person moves a sum in which each of its rows is clipped by itself."""
    alone = torch.zeros_like(y).repeat(ROWS, 1, 1)
    for row in range(ROWS):
        alone[row, row] = y[row]
    task = of_persons(classification(), summed=True)
    found = clipped_sum(model, task.losses, x.expand(ROWS, *x.shape), alone, Flat(bound))
    return float(torch.stack([t.double().square().sum() for t in found.total.values()]).sum().sqrt())


def test_rows_that_are_measured_one_by_one_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: norms of rows added up in place of the norm of their sum."""
    model, (x, y) = images(), batch((2, 5, 5))
    task, bound = of_persons(classification(), summed=True), 0.4
    total, _ = by_hand(model, x, y, bound, summed=True)

    def first_row(self: bookkeeping.PassRecorder, by_row: dict[str, bookkeeping.Piece]) -> object:
        return {n: bookkeeping.Dense(self._by_example(p.dense())[:, 0]) for n, p in by_row.items()}

    monkeypatch.setattr(bookkeeping.PassRecorder, "_of_examples", first_row)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowClippingWarning)
        found = clipped_sum(taking_persons(model, Slot(ROWS)), task.losses, x, y, Flat(bound))
    # The probe sees that books and gradients differ, and takes the slow way, which is right.
    for mine, truth in zip(found.total.values(), total, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-3, atol=1e-5)


def test_metrics_are_by_person() -> None:
    """One person with many rows weighs no more than another with one."""
    task = of_persons(classification(metrics=["auc"]), summed=False)
    y = torch.tensor([[[1, 0], [1, 0], [1, 0]], [[1, 1], [0, 0], [0, 0]]])
    outputs = torch.zeros(2, 3, 2)
    outputs[:, :, 0] = 1.0  # all rows are told 0
    found = task.evaluate(outputs, y)
    assert found["accuracy"] == 0.5  # of rows it would be 3/4
    assert task.share("accuracy", outputs, y).tolist() == [1.0, 0.0]
    assert found["auc"] == 0.5
    nobody = torch.zeros_like(y)
    assert task.share("accuracy", outputs, nobody).tolist() == [0.0, 0.0]
    assert task.losses(outputs, nobody).tolist() == [0.0, 0.0]


def test_numbers_are_learned_by_person() -> None:
    task = of_persons(regression(), summed=False)
    y = torch.tensor([[[1.0, 2.0], [1.0, 4.0]], [[1.0, 1.0], [0.0, 9.0]]])
    assert task.losses(torch.zeros(2, 2, 1), y).tolist() == [10.0, 1.0]
