"""Sharpness-aware steps at record level: uphill along the gradient that was released before, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modicum.core.optimisers import Sgd
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import DpFedSamRecord
from modicum.papers.fedcompdp.climbing import Climbing
from modicum.privacy.noise import SimulatedNoise
from modicum.training.plain import Supervised
from tests.mechanisms.stage import OpenGate, Silent, Stage, double_model, loop, records
from tests.test_non_interference import interferes

LR, RHO, STEPS, N = 0.5, 0.3, 3, 12


def test_steps_without_noise_by_hand() -> None:
    backend, first = loop(double_model("dense", 0))
    mechanism = RecordLocal(steps=STEPS)
    stage = Stage(mechanism, backend)
    job = stage.job("a", records(1, N), first, Silent(0), bound=1e6)
    (message, _), *_ = mechanism.run([job], replace(stage.kit(), training=Climbing(Sgd(LR), RHO)))
    theta, before = first.clone()[None], torch.zeros(1, len(first), dtype=first.dtype)
    for _ in range(STEPS):
        at = theta + RHO * before / before.norm().clamp(min=1e-12)
        before = backend.gradients(at, [records(1, N)], Supervised().losses)
        theta = theta - LR * before
    torch.testing.assert_close(message.update, theta[0] - first)


def test_the_climb_is_along_what_was_released() -> None:
    """With noise, the second step's gradient is that of the point which the *noised* first one leads to."""
    backend, first = loop(double_model("dense", 0))
    mechanism = RecordLocal(steps=2)
    stage = Stage(mechanism, backend, budget=1e4)  # noise that moves the step without drowning it
    job = stage.job("a", records(1, N), first, SimulatedNoise(3), bound=50.0)
    mechanism.run([job], replace(stage.kit(), training=Climbing(Sgd(LR), RHO)))
    assert isinstance(job.gate, OpenGate)
    (event, _, raw), (_, _, second) = job.gate.private
    noised = ReplayedNoise(event, raw["gradient"]).gradient / N
    theta = (first - LR * noised + RHO * noised / noised.norm())[None]
    expected = N * backend.gradients(theta, [records(1, N)], Supervised().losses)[0]
    torch.testing.assert_close(second["gradient"], expected)
    raw_theta = (first - LR * noised + RHO * raw["gradient"] / raw["gradient"].norm())[None]
    along_raw = N * backend.gradients(raw_theta, [records(1, N)], Supervised().losses)[0]
    assert not torch.allclose(second["gradient"], along_raw)  # a climb along the raw gradient would be a leak


class ReplayedNoise:
    """The same draw again, from the same seed and key."""

    def __init__(self, event: object, raw: torch.Tensor) -> None:
        gate = OpenGate(SimulatedNoise(3))
        self.gradient = gate.release(event, 0, {"gradient": raw})["gradient"]  # type: ignore[arg-type]


def test_it_does_not_interfere(tmp_path: Path) -> None:
    assert not interferes(DpFedSamRecord(steps=3), tmp_path)


def test_bad_settings_get_one_line() -> None:
    with pytest.raises(UserError, match="steps to 2 or more"):
        DpFedSamRecord(steps=1).build(Setting(2, 2, 2))
    with pytest.raises(UserError, match="uphill"):
        Climbing(ascent=0.0)
