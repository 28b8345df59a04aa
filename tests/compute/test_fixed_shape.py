"""Steps of fixed shape, as a GPU replays them, give the loop's results; the replay is played on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.compute.client_batched import fixed_shape
from modicum.compute.client_batched import model as client_batched
from modicum.compute.client_batched.fixed_shape import Stack, rounded
from modicum.compute.client_batched.stacked import StackedEngine
from modicum.compute.clipping.capture import Graphs
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.stack import Pool
from modicum.models import build
from tests.compute.replays import Replayed
from tests.compute.stacks import BOUNDS, clips, error, losses, rules, stack

SHAPES = {"mlp": (4,), "cnn-small": (1, 8, 8), "cnn8": (1, 8, 8)}
OPTIONS: dict[str, dict[str, int]] = {"cnn8": {"width": 8}}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_shape, "use_graphs", lambda _: True)
    monkeypatch.setattr(client_batched, "use_patches", lambda _: True)
    monkeypatch.setattr(fixed_shape, "Graphs", lambda: Graphs(Replayed))


def engine(model: nn.Module) -> StackedEngine:
    return StackedEngine(model, LoopBackend(model))


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("name", SHAPES)
def test_replays_give_the_loops_results(name: str) -> None:
    """Other parameters, records, batch sizes and bounds each time, in two padded sizes."""
    model = build(name, SHAPES[name], 10, seed=0, **OPTIONS.get(name, {})).double()
    theta, records = stack(model, SHAPES[name], (9, 20, 17))
    found, loop, generator = engine(model), LoopBackend(model), torch.Generator().manual_seed(0)
    for step in range(10):
        theta = theta + 0.01 * torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        sizes = (3, step, 5 + step)  # the second client's first batch is empty
        chosen = [torch.randperm(len(r), generator=generator)[:n] for r, n in zip(records, sizes, strict=True)]
        batches = Pool(records).batches(chosen)
        bounds = [C * (1 + step) for C in BOUNDS[:3]]
        assert error(found.gradients(theta, batches, losses), loop.gradients(theta, batches, losses)) <= 1e-8
        for rule in rules(loop.layout):
            sums, norms = found.clipped_sums(theta, batches, losses, clips(bounds, rule))
            expected, expected_norms = loop.clipped_sums(theta, batches, losses, clips(bounds, rule))
            assert error(sums, expected) <= 1e-8
            for mine, theirs in zip(norms, expected_norms, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-12)
    assert len(found._fixed.graphs._kept) == 8  # gradients and three rules, each in two sizes


@pytest.mark.usefixtures("replayed")
def test_a_poisoned_record_counts_as_zero_also_as_filling() -> None:
    model = build("mlp", (4,), 3, seed=0).double()
    theta, records = stack(model, (4,), (6, 6, 6), 3)
    records[1].x[0, 0] = torch.inf  # fills up its client's batch even where it was not drawn
    found, loop = engine(model), LoopBackend(model)
    for chosen in ([0, 2], [1, 2, 3]):
        batches = Pool(records).batches([torch.tensor([1, 2, 4, 5]), torch.tensor(chosen), torch.tensor([1, 3])])
        for _ in range(4):
            sums, norms = found.clipped_sums(theta, batches, losses, clips(BOUNDS[:3]))
            expected, expected_norms = loop.clipped_sums(theta, batches, losses, clips(BOUNDS[:3]))
            assert error(sums, expected) <= 1e-8
            torch.testing.assert_close(norms[1], expected_norms[1])


def test_sizes_are_few_and_little_larger() -> None:
    assert rounded([10, 10]) == 10
    padded = {n: rounded([n, 1]) for n in range(2, 3000)}
    assert all(n <= size <= max(n + 7, 1.125 * n) for n, size in padded.items())
    assert len(set(padded.values())) <= 60


def test_filled_up_rows_are_the_clients_own() -> None:
    model = build("mlp", (4,), 3, seed=0)
    theta, records = stack(model, (4,), (3, 4), 3)
    pooled = Pool(records).batches([torch.tensor([2]), torch.tensor([3, 1])])
    made = Stack.of(pooled, theta)
    assert made.real.tolist() == [[1.0] + [0.0] * 7, [1.0, 1.0] + [0.0] * 6]
    torch.testing.assert_close(made.x.view(2, 8, 4)[0], records[0].x[[2] + [0] * 7])
    torch.testing.assert_close(made.targets["y"].view(2, 8)[1], records[1].targets["y"][[3, 1] + [0] * 6])
