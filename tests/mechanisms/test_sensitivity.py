"""What goes to the gate moves by at most the sensitivity when one unit is removed or replaced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import modicum as mo
from modicum.core.clips import Flat
from modicum.core.messages import Decision
from modicum.core.optimisers import Sgd
from modicum.core.parts import Batch, Signal, SignalName
from modicum.errors import UnsoundError
from modicum.mechanisms.client_level import ClientLevel, clip_updates
from modicum.mechanisms.common import contributions
from modicum.mechanisms.record_local import RecordLocal
from modicum.mechanisms.record_sums import RecordSums
from modicum.policies import Fixed
from modicum.privacy.events import Release
from modicum.privacy.spec import SecureAggregation
from modicum.training.local_steps import LocalSteps
from tests.compute.stacks import rules
from tests.mechanisms.stage import OpenGate, Silent, Stage, double_model, loop, records

SIGNALS = (Signal(SignalName.CLIP_BIT), Signal(SignalName.SQUARE_NORM, 5.0))
ROUNDING = 1e-9

seeds = st.integers(0, 2**20)
kinds = st.sampled_from(["linear", "dense", "conv"])
scales = st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 1e2, 1e6, 1e30])
bounds = st.sampled_from([1e-6, 0.1, 1.0, 30.0, 1e6])


def _released(stage: Stage, theta: Tensor, batch: Batch, bound: float) -> tuple[Release, dict[str, Tensor]]:
    job = stage.job("c", batch, theta, Silent(0), bound=bound)
    stage.run([job])
    assert isinstance(job.gate, OpenGate)
    event, _, sums = job.gate.private[0]
    return event, sums


def _distance(event: Release, one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far apart the two are, in units of noise over all blocks: at most 1/z under zero-out."""
    return math.sqrt(
        sum(float(((one[b.name] - other[b.name]) / b.noise_std).square().sum()) for b in event.blocks)
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=seeds, kind=kinds, scale=scales, bound=bounds, rule=st.integers(0, 2), odd=st.booleans())
def test_one_record_moves_a_query_by_at_most_its_sensitivity(
    seed: int, kind: str, scale: float, bound: float, rule: int, odd: bool
) -> None:
    """Gradient and signals together. `odd` makes the record one that overflows or is not a number."""
    backend, theta = loop(double_model(kind, seed))
    mechanism = RecordLocal(steps=1, rule=rules(backend.layout)[rule])
    stage = Stage(mechanism, backend, policy=Fixed(1.0, signals=SIGNALS), declared=6)
    batch, other = records(seed, 6, scale), records(seed + 1, 1, scale)
    if odd:
        batch.x[2] = torch.tensor([math.inf, math.nan, 1e308, -1e308, 0.0, 1.0], dtype=torch.float64)
    rest = [0, 1, 3, 4, 5]
    replaced = Batch(batch.x.clone(), {"y": batch.targets["y"].clone()})
    replaced.x[2], replaced.targets["y"][2] = other.x[0], other.targets["y"][0]
    event, whole = _released(stage, theta, batch, bound)
    _, without = _released(stage, theta, batch.take(torch.tensor(rest)), bound)
    _, changed = _released(stage, theta, replaced, bound)
    assert all(bool(torch.isfinite(value).all()) for value in whole.values())
    assert (whole["gradient"] - without["gradient"]).norm() <= bound * (1 + ROUNDING)
    assert (whole["gradient"] - changed["gradient"]).norm() <= 2 * bound * (1 + ROUNDING)
    assert _distance(event, whole, without) * event.noise_multiplier <= 1 + ROUNDING
    assert _distance(event, whole, changed) * event.noise_multiplier <= 2 + ROUNDING


def test_the_bound_is_reached_so_the_check_has_teeth() -> None:
    """Without clipping the same record moves the sum by far more."""
    backend, theta = loop(double_model("linear", 0))
    stage = Stage(RecordLocal(steps=1), backend)
    batch = records(0, 6, 3.0)
    _, whole = _released(stage, theta, batch, 1.0)
    _, without = _released(stage, theta, batch.take(torch.arange(1, 6)), 1.0)
    _, loose = _released(stage, theta, batch, 1e6)
    _, loose_without = _released(stage, theta, batch.take(torch.arange(1, 6)), 1e6)
    assert (whole["gradient"] - without["gradient"]).norm() == pytest.approx(1.0, rel=1e-6)
    assert (loose["gradient"] - loose_without["gradient"]).norm() > 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=seeds,
    size=st.integers(1, 2000),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e5, 1e30, math.inf, math.nan]),
    bound=st.sampled_from([1e-12, 1e-3, 1.0, 7.7, 1e12]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_client_contributes_at_most_its_bound(
    seed: int, size: int, scale: float, bound: float, dtype: torch.dtype
) -> None:
    """Also in single precision, where rounding could lift a clipped norm above the bound, and beside anyone."""
    generator = torch.Generator().manual_seed(seed)
    update = (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)
    other = torch.full_like(update, 0.5 / size)
    rows = torch.stack([other, update])
    norms = clip_updates(rows, [1.0, bound])
    assert torch.equal(rows[0], other)
    assert rows.dtype == dtype
    assert rows[1].double().norm() <= bound
    for value in contributions(norms[1:], bound, SIGNALS).values():
        assert value.abs().max() <= 0.5


@pytest.mark.parametrize("local", [LocalSteps(batch=2, steps=3), LocalSteps(batch=4, epochs=2)])
def test_a_client_is_clipped_whatever_its_training_does(local: LocalSteps) -> None:
    backend, theta = loop(double_model("dense", 1))
    stage = Stage(ClientLevel(local=local), backend, lr=1e8)
    event, sums = _released(stage, theta, records(3, 8, 1e3), 0.5)
    assert sums["update"].norm() <= 0.5
    assert event.blocks[0].bound == 0.5


def test_one_record_in_float32_stays_within_the_bound() -> None:
    """Each record alone: the sum of one clipped gradient."""
    for seed in range(20):
        model = double_model("dense", seed).float()
        backend, theta = loop(model)
        stage = Stage(RecordLocal(steps=1), backend)
        batch = records(seed, 1, 10.0**seed)
        single = Batch(batch.x.float().clamp(-1e30, 1e30), batch.targets)
        _, sums = _released(stage, theta, single, 0.3)
        assert sums["gradient"].double().norm() <= 0.3


@dataclass(frozen=True)
class Loose(Flat):
    """Clips to more than it is told."""

    def scaled_to(self, bound: float) -> Flat:
        return Flat(2 * bound)


def test_a_rule_that_clips_to_more_than_was_decided_is_refused(tmp_path: Path) -> None:
    """The sensitivity is asked of the rule that clips, not of the decision alone."""
    assert RecordLocal().sensitivity(Decision(0.5)) == 0.5
    with pytest.raises(UnsoundError, match=r"clips to 1 where 0\.5 was decided"):
        RecordLocal(rule=Loose()).sensitivity(Decision(0.5))
    sums = RecordSums(view=SecureAggregation(5, 1), optimiser=Sgd(1.0), rule=Loose())
    fed = mo.Federation.from_dataset("digits", clients=5, budgets=4.0)
    for i, mechanism in enumerate((RecordLocal(rule=Loose()), sums)):
        with pytest.raises(UnsoundError, match="clips to"):
            mo.train(fed, method=mo.methods.Composed(Fixed(0.5), mechanism), rounds=1, folder=tmp_path / str(i))
