"""Paid metrics as people see them: where a rate can be, and with the noise that is in them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import modicum as mo
from modicum.core.facts import ClientFacts, Metric
from modicum.core.messages import NoiseFacts, Released, ReleasedSum
from modicum.mechanisms.common import told_metrics
from modicum.privacy.spec import Unit

ACCURACY = Metric("accuracy", 1, 4.0)
CLIENTS = (ClientFacts("a", 100, 1.0, 1, 20), ClientFacts("b", 100, 1.0, 1, 80))


def released(client: str, value: float) -> Released:
    return Released(client, 0, torch.zeros(1), {}, NoiseFacts(1.0, 1.0), {"accuracy": value})


@pytest.mark.parametrize(("values", "told"), [((-0.3, 0.014), 0.0), ((1.5, 0.9), 1.0), ((0.5, 0.7), 0.6)])
def test_a_rate_stays_where_a_rate_can_be(values: tuple[float, float], told: float) -> None:
    opened = tuple(released(name, value) for name, value in zip("ab", values, strict=True))
    found, _ = told_metrics(opened, [ACCURACY], Unit.RECORD, CLIENTS)
    assert found["accuracy"] == pytest.approx(told)


def test_what_is_no_declared_rate_is_told_as_it_is() -> None:
    opened = (Released("a", 0, torch.zeros(1), {}, NoiseFacts(1.0, 1.0), {"loss": 2.5, "sigma": -1.0}),)
    assert told_metrics(opened, [ACCURACY], Unit.RECORD, CLIENTS) == ({"loss": 2.5, "sigma": -1.0}, {})
    assert told_metrics(None, [ACCURACY], Unit.RECORD, CLIENTS) == ({}, {})
    diverged, _ = told_metrics((released("a", math.nan),), [ACCURACY], Unit.RECORD, CLIENTS)
    assert math.isnan(diverged["accuracy"])


def test_the_noise_of_a_mean_and_of_a_sum() -> None:
    both = (released("a", 0.5), released("b", 0.5))
    _, noise = told_metrics(both, [ACCURACY], Unit.RECORD, CLIENTS)
    assert noise["accuracy"] == pytest.approx(math.hypot(4 / 20, 4 / 80) / 2)
    _, noise = told_metrics(both, [ACCURACY], Unit.CLIENT, CLIENTS)
    assert noise["accuracy"] == pytest.approx(4 * 0.5 * math.sqrt(2) / 2)
    whole = ReleasedSum(0, torch.zeros(1), {}, NoiseFacts(1.0, 1.0), 10.0, {"accuracy": 0.5})
    _, noise = told_metrics(whole, [ACCURACY], Unit.CLIENT, CLIENTS)
    assert noise["accuracy"] == pytest.approx(4 * 0.5 / 10)


def test_the_noise_that_is_told_is_the_noise_that_was_drawn(tmp_path: Path) -> None:
    """60 rounds with a model that does not move: the spread of what was released, against what is told of it.

    Sixty draws give a standard deviation within 30% of the truth but for one time in a thousand.
    """
    fed = mo.Federation.from_dataset("digits", clients=2, budgets=1e6, validation=0.5)
    metric = Metric("accuracy", 1, 10.0)
    run = mo.train(
        fed, method=mo.methods.DpSgd(lr=1e-9), rounds=60, metrics=(metric,), folder=tmp_path / "run", seed=3
    )
    values = torch.tensor([record.released["accuracy"] for record in run.records])
    told = {record.noise["accuracy"] for record in run.records}
    assert len(told) == 1
    assert float(values.std()) == pytest.approx(told.pop(), rel=0.3)
    row = run.summary.noise
    assert set(row) == {"accuracy"}
    assert f"± {row['accuracy']:.3f}" in (run.folder / "report.html").read_text()
