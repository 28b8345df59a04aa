"""A hot start is a function of public records, and every method begins with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation, prepare
from modicum.federation.identity import run_id
from modicum.methods import DpSgd, FedAvg, PacDp


def experiment(poison: float = 0.0, hot_start: int = 5, proxy: int = 60) -> Experiment:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 140)
    x = (rng.normal(size=(140, 3)) + 3 * np.eye(3)[y]).astype(np.float32)
    public, held, private = (
        Arrays(x[a:b] + np.float32(poison * (a >= 80)), y[a:b]) for a, b in ((0, proxy), (60, 80), (80, 140))
    )
    nobody = Arrays.empty(private)
    clients = (ClientData("a", private, nobody, nobody),)
    data = FederatedData("toy", clients, private, 3, public, held if proxy else Arrays.empty(held), 3)
    return Experiment(federation=Federation(data, (1.0,)), method=DpSgd(), rounds=2, hot_start=hot_start)


def first(e: Experiment) -> torch.Tensor:
    return prepare(e, e.method.build(e.setting)).first


def test_private_records_have_no_part_in_it() -> None:
    assert torch.equal(first(experiment()), first(experiment(poison=1e6)))


def test_every_method_gets_the_same() -> None:
    firsts = [first(replace(experiment(), method=m)) for m in (DpSgd(), PacDp(), FedAvg())]
    assert all(torch.equal(firsts[0], f) for f in firsts)


def test_it_learns_the_task() -> None:
    e = experiment(hot_start=30)
    data = prepare(e, e.method.build(e.setting))
    torch.nn.utils.vector_to_parameters(data.first, data.model.parameters())
    right = (data.model(data.test.x).argmax(1) == data.test.targets["y"]).float().mean()
    assert right > 0.85


def test_global_randomness_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first(experiment())
    assert torch.equal(torch.rand(2), expected)


def test_it_is_part_of_the_run() -> None:
    assert run_id(experiment()) != run_id(experiment(hot_start=6))


def test_without_public_records_of_the_task_it_is_refused() -> None:
    with pytest.raises(UserError, match="hot start"):
        experiment(proxy=0)
