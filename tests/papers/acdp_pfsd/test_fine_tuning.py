"""Further local steps: each client's model learns from its own records alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.compute.client_batched.fused import FusedBackend
from modicum.core.layout import Layout
from modicum.core.optimisers import Sgd
from modicum.core.parts import Batch
from modicum.errors import UserError
from modicum.federation.evaluation import evaluate
from modicum.papers.acdp_pfsd.fine_tuning import fine_tune


def client(label: int, records: int = 20) -> Batch:
    return Batch(torch.randn(records, 3), {"y": torch.full((records,), label)})


def test_models_learn_from_their_own_records() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    backend, first = FusedBackend(model), Layout.of(model).read(model)
    clients = [client(0), client(1), client(1, records=5)]
    tuned = fine_tune(backend, torch.stack([first] * 3), clients, Sgd(0.5), steps=30, batch=8)
    assert [evaluate(backend, t, c)["accuracy"] for t, c in zip(tuned, clients, strict=True)] == [1.0] * 3
    assert evaluate(backend, tuned[0], clients[1])["accuracy"] < 0.2
    without = fine_tune(backend, torch.stack([first] * 2), clients[:2], Sgd(0.5), steps=30, batch=8)
    torch.testing.assert_close(without, tuned[:2])
    with pytest.raises(UserError, match="at least one step"):
        fine_tune(backend, first[None], clients[:1], Sgd(0.5), steps=0)
