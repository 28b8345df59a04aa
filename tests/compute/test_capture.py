"""Work that repeats itself is replayed, and work that cannot be is found out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from modicum.compute.clipping.capture import CannotCaptureWarning, Graphs, filled_up, rounded_up
from tests.compute.replays import Replayed


def twice(x: Tensor) -> tuple[Tensor, ...]:
    return (2 * x,)


def test_work_that_reads_more_than_its_inputs_is_not_replayed() -> None:
    """A graph would repeat what a counter was at the capture."""
    state = [0.0]

    def work(x: Tensor) -> tuple[Tensor, ...]:
        state[0] += 1
        return (x * state[0],)

    graphs, x = Graphs(Replayed), torch.ones(2)
    found = [float(graphs.run("work", work, [x])[0][0]) for _ in range(2)]
    with pytest.warns(CannotCaptureWarning, match="other numbers"):
        found.append(float(graphs.run("work", work, [x])[0][0]))
    found += [float(graphs.run("work", work, [x])[0][0]) for _ in range(2)]
    assert found == [1.0, 2.0, 5.0, 6.0, 7.0]  # 3 and 4 were compared: the work, and the replay that was refused


def test_whether_work_is_replayed_is_settled_on_blanks() -> None:
    """Here work reads more than its inputs only where these hold a record."""
    state, seen = [0.0], []

    def work(x: Tensor) -> tuple[Tensor, ...]:
        state[0] += 1
        seen.append(float(x[0]))
        return (x * (state[0] if x[0] else 1.0),)

    for blank, refused in ((lambda: [torch.zeros(2)], False), (None, True)):
        graphs = Graphs(Replayed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CannotCaptureWarning)
            for _ in range(3):
                graphs.run("work", work, [torch.ones(2)], blank)
        assert graphs.refused is refused
    assert seen == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_work_that_cannot_be_captured_is_told_once_and_runs_as_it_is() -> None:
    class Fails:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            raise NotImplementedError

    graphs = Graphs(Fails)
    with pytest.warns(CannotCaptureWarning) as warned:
        found = [float(graphs.run("work", twice, [torch.ones(1)])[0]) for _ in range(6)]
    assert found == [2.0] * 6
    assert len(warned) == 1


def test_a_replay_takes_other_numbers_and_another_shape_another_replay() -> None:
    graphs = Graphs(Replayed)
    for step in range(5):
        for size in (1, 2):
            x = torch.full((size,), float(step))
            assert graphs.run("work", twice, [x])[0].tolist() == [2.0 * step] * size
    assert len(graphs._kept) == 2


def test_only_so_many_graphs_are_kept_and_shapes_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.compute.clipping.capture.KEPT", 2)
    monkeypatch.setattr("modicum.compute.clipping.capture.WATCHED", 3)
    graphs = Graphs(Replayed)
    for size in (1, 2, 3, 4, 5):
        for _ in range(4):
            graphs.run("work", twice, [torch.ones(size)])
    assert len(graphs._kept) == 2
    assert len(graphs._seen) == 3


def test_sizes_are_few_and_little_larger() -> None:
    padded = {n: rounded_up(n) for n in range(1, 3000)}
    assert all(n <= size <= max(n + 7, 1.125 * n) for n, size in padded.items())
    assert len(set(padded.values())) <= 60
    assert filled_up(torch.tensor([5.0, 6.0]), 4).tolist() == [5.0, 6.0, 5.0, 5.0]
