"""The noise that was charged is in every layer and every block. False alarm of each test: 1e-6 (`FALSE_ALARM`)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from modicum.attacks.probe import ProbeBackend
from modicum.core.messages import Noised, ReleasedSum
from modicum.core.parts import Batch, Mechanism, Signal, SignalName
from modicum.core.release_gate import ReservedSumGate
from modicum.core.round_state import RoundState
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.policies import Fixed
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.spec import PrivacySpec, SecureAggregation, ServerSeesMessages, TrustedServer
from modicum.training.local_steps import LocalSteps
from tests.mechanisms.stage import Silent, Stage, has_std, loop, opened_of, records

SIGNALS = (Signal(SignalName.CLIP_BIT), Signal(SignalName.SQUARE_NORM, 5.0))
CLIENTS, BOUND = 400, 2.5
ONE = LocalSteps(batch=1, steps=1)


def wide_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 60), nn.Tanh(), nn.LayerNorm(60), nn.Linear(60, 60), nn.Linear(60, 3)
    ).double()


@pytest.mark.parametrize(
    "mechanism", [RecordLocal(steps=1), RecordLocal(batch=4, steps=1), ClientLevel(local=ONE)]
)
def test_every_layer_has_the_charged_noise(mechanism: Mechanism) -> None:
    backend, theta = loop(wide_model())
    stage = Stage(mechanism, backend)
    with_noise, without = (
        stage.run([stage.job("c", records(1, 8), theta, noise, bound=BOUND)])[0][0].update
        for noise in (SimulatedNoise(3), Silent(3))
    )
    noise = with_noise - without
    job = stage.job("c", records(1, 8), theta, Silent(3), bound=BOUND)
    event = mechanism.events(job, stage.kit())[0]
    over = mechanism.expected_batch(job.facts) if isinstance(mechanism, RecordLocal) else 1.0
    std = job.plan.releases[0].noise_multiplier * BOUND / over
    assert event.blocks[0].noise_std / over == pytest.approx(std)
    layers = backend.layout.slices()
    assert any(noise[where].numel() > 300 for where in layers.values())
    for name, where in layers.items():
        assert has_std(noise[where], std), name
        # The check has teeth: it notices none at all, and in large layers 30% too little.
        if noise[where].numel() > 300:
            assert not has_std(0.7 * noise[where], std)
        assert not has_std(0 * noise[where], std)


@pytest.mark.parametrize(
    "mechanism",
    [RecordLocal(steps=1), ClientLevel(local=ONE), ClientLevel(local=ONE, view=SecureAggregation(9, 1, 1))],
)
def test_every_block_of_a_query_has_the_charged_noise(mechanism: Mechanism) -> None:
    """Gradient or update, clip bit and squared norm of one query; together they cost what the plan says."""
    stage = Stage(mechanism, ProbeBackend(6), policy=Fixed(1.0, signals=SIGNALS))
    theta = torch.ones(6, dtype=torch.float64)
    jobs = {
        type(noise): [stage.job(f"c{i}", records(i, 1), theta, noise, bound=BOUND) for i in range(CLIENTS)]
        for noise in (SimulatedNoise(4), Silent(4))
    }
    noised, plain = ([message for message, _ in stage.run(j)] for j in jobs.values())
    event = jobs[Silent][0].gate.private[0][0]  # type: ignore[attr-defined]
    stds = {block.name: block.noise_std for block in event.blocks}
    updates = torch.stack([a.update - b.update for a, b in zip(noised, plain, strict=True)])
    assert has_std(updates, stds.pop(mechanism.purpose))
    for name, std in stds.items():
        signals = torch.tensor([a.signals[name] - b.signals[name] for a, b in zip(noised, plain, strict=True)])
        assert has_std(signals, std), name
        assert not has_std(signals / 2, std)
    assert event.noise_multiplier == pytest.approx(jobs[Silent][0].plan.releases[0].noise_multiplier, rel=1e-12)


def test_blocks_do_not_share_their_noise() -> None:
    """Correlation of two blocks' noise over 400 clients: within 5 standard errors (6e-7)."""
    stage = Stage(RecordLocal(steps=1), ProbeBackend(6), policy=Fixed(1.0, signals=SIGNALS))
    theta = torch.ones(6, dtype=torch.float64)
    empty = records(0, 1, scale=0.0)
    messages = [
        m for m, _ in stage.run([stage.job(f"c{i}", empty, theta, SimulatedNoise(1)) for i in range(CLIENTS)])
    ]
    columns = torch.stack(
        [torch.tensor([m.update[0].item(), *m.signals.values()], dtype=torch.float64) for m in messages], 1
    )
    correlations = torch.corrcoef(columns)
    off_diagonal = correlations[~torch.eye(len(correlations), dtype=torch.bool)]
    assert off_diagonal.abs().max() < 5 / math.sqrt(CLIENTS)


def test_an_empty_batch_still_releases_noise() -> None:
    backend, theta = loop(wide_model())
    mechanism = RecordLocal(batch=1, steps=1)
    stage = Stage(mechanism, backend, declared=400)
    job = stage.job("c", records(1, 3), theta, SimulatedNoise(2))
    [(message, _)] = stage.run([job])
    assert len(job.gate.drawn[0]) == 0  # type: ignore[attr-defined]
    assert isinstance(message, Noised)
    assert has_std(message.update, job.plan.releases[0].noise_multiplier)


def _cohort(
    mechanism: ClientLevel, noise: SimulatedNoise, seed: int, clients: int = 4
) -> tuple[Stage, list[Any], RoundState]:
    stage = Stage(mechanism, ProbeBackend(4000))
    theta = torch.ones(4000, dtype=torch.float64)
    blank = Batch(torch.zeros(1, 4000, dtype=torch.float64), {"y": torch.zeros(1, dtype=torch.long)})
    jobs = [stage.job(f"c{i}", blank, theta, noise, round=seed, bound=BOUND) for i in range(clients)]
    events = {j.facts.name: mechanism.events(j, stage.kit()) for j in jobs}
    messages = [message for message, _ in stage.run(jobs)]
    return stage, messages, RoundState(seed, theta, {}, tuple(events), float(clients), events=events)


def test_the_shares_of_secure_aggregation_add_up_to_the_claim() -> None:
    """P−c shares in the sum make the calibrated noise; with all P there is a little more (R8)."""
    participants, dropouts = 4, 1
    mechanism = ClientLevel(local=ONE, view=SecureAggregation(participants, 0, dropouts))
    stage, shares, opening = _cohort(mechanism, SimulatedNoise(1), 0)
    local = calibrate_noise(PrivacySpec(unit="client"), stage.budget, NoSampling(), 1)
    honest = opened_of(mechanism, shares[dropouts:], opening)
    everyone = opened_of(mechanism, shares, opening)
    assert isinstance(honest, ReleasedSum)
    assert isinstance(everyone, ReleasedSum)
    least = local * BOUND / participants
    assert has_std(honest.update, least * math.sqrt(1))
    assert has_std(everyone.update, least * math.sqrt(participants / (participants - dropouts)))
    assert not has_std(shares[0].update, local * BOUND)  # one share alone protects nobody
    assert honest.facts.variance == pytest.approx(least**2, rel=1e-4)


def test_a_trusted_server_adds_the_noise_of_one_client_to_the_sum() -> None:
    mechanism = ClientLevel(local=ONE, view=TrustedServer())
    stage, sealed, opening = _cohort(mechanism, SimulatedNoise(1), 0)
    assert all(not message.update.any() for message in sealed)
    gate = ReservedSumGate(SimulatedNoise(1), ())
    gate._tokens = _Anything()  # type: ignore[assignment]
    opened = opened_of(mechanism, sealed, replace(opening, gate=gate))
    assert isinstance(opened, ReleasedSum)
    local = calibrate_noise(PrivacySpec(unit="client", view=ServerSeesMessages()), stage.budget, NoSampling(), 1)
    assert has_std(opened.update, local * BOUND / 4)


class _Anything(dict):  # type: ignore[type-arg]
    """Says that everything is reserved."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> _Anything:
        return self

    def use(self, release: object) -> None:
        pass
