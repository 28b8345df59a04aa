"""A teacher's outputs are the model's own, also where a GPU replays them; the replay is played on a CPU."""

from __future__ import annotations

import pytest
import torch

from modicum.compute import Way
from modicum.compute.clipping import loop
from modicum.compute.clipping.capture import Graphs
from modicum.compute.clipping.loop import LoopBackend
from modicum.models import build
from tests.compute.replays import Replayed


@pytest.mark.parametrize("way", [Way.AUTO, Way.EAGER])
def test_replayed_outputs_are_the_models(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "applies", lambda way, _: way is not Way.EAGER)
    monkeypatch.setattr(loop, "Graphs", lambda: Graphs(Replayed))
    monkeypatch.setattr(loop, "EVALUATION_BATCH", 24)
    model = build("resnet18", (3, 8, 8), 5, seed=0, dropout=0.5).double().train()
    backend, plain = LoopBackend(model, way), LoopBackend(model, Way.EAGER)
    first = backend.layout.read(model)
    for step, rows in enumerate((3, 7, 8, 5, 20, 30)):
        theta, x = first * (1 + 0.1 * step), torch.randn(rows, 3, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(backend.outputs(theta, x), plain.outputs(theta, x))
    assert len(backend._graphs._kept) == (way is Way.AUTO)
    assert model.training
