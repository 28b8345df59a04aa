"""Adaptive quantile clipping finds the quantile, from far above and far below, through its noise."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.aggregation import Mean
from modicum.core.facts import PublicFacts
from modicum.core.messages import NoiseFacts, ReleasedSum
from modicum.core.parts import Observation, SignalName
from modicum.errors import UserError
from modicum.mechanisms.common import query
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed
from modicum.policies import AdaptiveQuantile
from modicum.privacy.events import joint_multiplier
from tests.rows import federation, simulate

PUBLIC = PublicFacts((), 1, 1, {})


def follow(policy: AdaptiveQuantile, norms: np.ndarray, rounds: int, noise: float, seed: int = 0) -> list[float]:
    """The bounds over a run in which the bits of these norms are released with this noise."""
    rng = np.random.default_rng(seed)
    state, bounds = policy.init(PUBLIC), []
    for round in range(rounds):
        decisions = policy.decide(state, round, ["a"])
        bounds.append(decisions["a"].bound)
        share = float(np.mean(norms <= bounds[-1])) + noise * rng.normal()
        facts = NoiseFacts(1.0, 1.0, {SignalName.CLIP_BIT: noise**2})
        opened = ReleasedSum(round, torch.zeros(1), {SignalName.CLIP_BIT: share}, facts, 1.0)
        state = policy.observe(state, Observation(round, opened, decisions))
    return bounds


NORMS = np.random.default_rng(3).lognormal(1.0, 0.7, 4000)


@pytest.mark.parametrize("start", [100.0, 0.01], ids=["100x-above", "100x-below"])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_converges_from_100_times_above_and_below(start: float, quantile: float, noise: float) -> None:
    truth = float(np.quantile(NORMS, quantile))
    bounds = follow(AdaptiveQuantile(start * truth, quantile), NORMS, 600, noise)
    late = np.exp(np.mean(np.log(bounds[-200:])))
    assert np.mean(late >= NORMS) == pytest.approx(quantile, abs=0.03)
    # It moves the right way from the first rounds on.
    assert abs(math.log(bounds[40] / truth)) < abs(math.log(start)) - 0.3


def test_the_published_wrong_sign_is_caught() -> None:
    """The mutant: C · exp(+η(b̄ − γ)) runs away from the quantile instead of towards it."""

    class WrongSign(AdaptiveQuantile):
        def observe(self, state: dict[str, float], observed: Observation) -> dict[str, float]:
            right = super().observe(state, observed)["bound"]
            return {"bound": state["bound"] ** 2 / right}

    truth = float(np.median(NORMS))
    for start in (100.0, 0.01):
        bounds = follow(WrongSign(start * truth), NORMS, 60, 0.0)
        assert abs(math.log(bounds[-1] / truth)) > abs(math.log(start))


def test_hopeless_noise_does_not_blow_the_bound_up() -> None:
    """Bits with noise 100 times their range: the bound wanders slowly instead of jumping by e^±20."""
    steps = np.diff(np.log(follow(AdaptiveQuantile(1.0), NORMS, 500, noise=100.0)))
    assert np.abs(steps).max() < 0.05
    plain = 0.2 * 100.0  # what the unweighted update would step by
    assert np.std(steps) < plain / 1000


def test_the_bits_cost_what_they_say() -> None:
    """All blocks together have the plan's multiplier; at ratio 10 the rest gets 0.5% more noise."""
    blocks = query("gradient", 3.0, 2.0, AdaptiveQuantile(ratio=10.0).signals)
    assert joint_multiplier(blocks) == pytest.approx(2.0, rel=1e-9)
    assert joint_multiplier(blocks) >= 2.0
    assert blocks[0].noise_multiplier / 2.0 == pytest.approx(1.005, abs=1e-4)
    assert blocks[1].noise_multiplier == pytest.approx(20.0)


@pytest.mark.parametrize("start", [100.0, 0.01], ids=["above", "below"])
def test_a_real_run_finds_the_median_norm(start: float, tmp_path: Path) -> None:
    """Paid bits within a budget. The server hardly moves the model, so the norms stay where they are."""
    norms = first_norms(tmp_path / "norms")
    truth = float(np.median(norms))
    policy = AdaptiveQuantile(start * truth, 0.5, rate=0.5)
    spec = Composed(policy, RecordLocal(), Mean(1e-6))
    sim = simulate(spec, tmp_path / "run", federation=federation(budgets=(50.0,) * 4), metrics=(), rounds=80)
    records = list(sim.rounds())
    sim.close()
    late = float(np.exp(np.mean([math.log(r.bound) for r in records[-30:]])))
    assert np.mean(norms <= late) == pytest.approx(0.5, abs=0.1)


def first_norms(folder: Path) -> np.ndarray:
    """The raw norms of all records at the first model, as only a test may see them."""
    from modicum.core.clips import Flat

    sim = simulate(Composed(AdaptiveQuantile(1.0), RecordLocal(), Mean()), folder)
    theta = sim.model.expand(len(sim.data.records), -1).clone()
    losses = sim.method.training.losses
    _, norms = sim.backend.clipped_sums(theta, sim.data.records, losses, [Flat()] * len(theta))
    sim.close()
    return torch.cat(norms).double().numpy()


@pytest.mark.parametrize(
    "settings",
    [{"initial": 0.0}, {"initial": math.inf}, {"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"ratio": 1.0}],
)
def test_bad_settings(settings: dict[str, float]) -> None:
    with pytest.raises(UserError):
        AdaptiveQuantile(**settings)
