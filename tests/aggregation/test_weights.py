"""Weights by R7: public, renormalised over those who answered, and refused for sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.aggregation import Mean, Momentum, NoiseAware, Weighted
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released, ReleasedSum
from modicum.core.parts import State
from modicum.errors import UserError
from modicum.methods import Composed
from modicum.policies import Fixed
from tests.rows import MECHANISMS, simulate

DIMENSION = 400
SIGMAS = (0.02, 0.05, 0.3, 1.0)
NAMES = tuple(f"c{i}" for i in range(len(SIGMAS)))
PUBLIC = PublicFacts(
    tuple(ClientFacts(name, 10 * (i + 1), 1.0, 5) for i, name in enumerate(NAMES)), 10, DIMENSION, {}
)


def draw(tau: float, seed: int) -> tuple[Released, ...]:
    """One direction for all, what is each client's own (norm about τ), and noise of its σ."""
    rng = np.random.default_rng(seed)
    common = np.ones(DIMENSION) / np.sqrt(DIMENSION)
    out = []
    for name, sigma in zip(NAMES, SIGMAS, strict=True):
        own = tau / np.sqrt(DIMENSION) * rng.normal(size=DIMENSION)
        update = common + own + sigma * rng.normal(size=DIMENSION)
        out.append(Released(name, 0, torch.from_numpy(update), {}, NoiseFacts(sigma**2, 1.0)))
    return tuple(out)


def learned(tau: float, rounds: int) -> State:
    rule, state = NoiseAware(), NoiseAware().init(PUBLIC)
    for seed in range(rounds):
        _, state = rule.combine(state, torch.zeros(DIMENSION, dtype=torch.float64), draw(tau, seed))
    return state


@pytest.mark.parametrize("tau", [0.5, 2.0, 8.0])
def test_the_spread_between_clients_is_estimated_without_the_noise(tau: float) -> None:
    state = learned(tau, 60)
    assert state["tau2"] / state["mass"] == pytest.approx(tau**2, rel=0.3, abs=0.1)


def test_weights_of_equal_clients_go_with_the_inverse_of_all_variance() -> None:
    rule, state = NoiseAware(), learned(2.0, 60) | {"records": dict.fromkeys(NAMES, 10)}
    tau2 = state["tau2"] / state["mass"]
    weights = rule.weights_of(state, draw(2.0, 99))
    for a, sa in zip(NAMES, SIGMAS, strict=True):
        for b, sb in zip(NAMES, SIGMAS, strict=True):
            expected = (tau2 + DIMENSION * sb**2) / (tau2 + DIMENSION * sa**2)
            assert weights[a] / weights[b] == pytest.approx(expected)


def test_noise_aware_beats_the_mean_at_unequal_noise() -> None:
    state, zero = learned(0.5, 30), torch.zeros(DIMENSION, dtype=torch.float64)
    truth = torch.full((DIMENSION,), DIMENSION**-0.5, dtype=torch.float64)
    errors = {"mean": 0.0, "aware": 0.0}
    for seed in range(200, 230):
        opened = draw(0.5, seed)
        errors["mean"] += (Mean().combine({}, zero, opened)[0] - truth).norm().item()
        errors["aware"] += (NoiseAware().combine(state, zero, opened)[0] - truth).norm().item()
    assert errors["aware"] < errors["mean"] / 5


@pytest.mark.parametrize("tau2", [0.0, 3.0])
def test_without_noise_clients_count_by_records(tau2: float) -> None:
    """Whether they differ or not: four unequal hospitals would otherwise vote."""
    exact = tuple(Released(n, 0, torch.ones(3), {}, NoiseFacts(0.0, 1.0)) for n in NAMES)
    weights = NoiseAware().weights_of(NoiseAware().init(PUBLIC) | {"tau2": tau2, "mass": 1.0}, exact)
    assert list(weights.values()) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_in_much_noise_clients_count_by_precision() -> None:
    weights = NoiseAware().weights_of(learned(0.001, 60), draw(0.001, 99))
    precisions = np.array(SIGMAS) ** -2.0
    assert list(weights.values()) == pytest.approx(list(precisions / precisions.sum()), abs=0.02)


def test_no_other_weights_predict_the_mean_over_records_better() -> None:
    """Σ a_i = 1 leaves E‖Σ a_i·u_i − Σ s_i·θ_i‖² = Σ (a_i − s_i)²·τ² + Σ a_i²·v_i: its gradient is constant."""
    tau2, state = 4.0, NoiseAware().init(PUBLIC) | {"tau2": 4.0, "mass": 1.0}
    a = np.array(list(NoiseAware().weights_of(state, draw(2.0, 0)).values()))
    s, v = np.array([0.1, 0.2, 0.3, 0.4]), DIMENSION * np.array(SIGMAS) ** 2
    assert a.sum() == pytest.approx(1.0)
    assert np.ptp((a - s) * tau2 + a * v) < 1e-12


def test_weighted_by_public_sizes_over_those_who_answered() -> None:
    rule = Weighted()
    answered = tuple(
        Released(name, 0, torch.full((2,), value), {}, NoiseFacts(0.0, 1.0))
        for name, value in (("c0", 1.0), ("c2", 5.0))
    )
    model, _ = rule.combine(rule.init(PUBLIC), torch.zeros(2), answered)
    torch.testing.assert_close(model, torch.full((2,), (10 * 1.0 + 30 * 5.0) / 40))


def test_given_weights_must_cover_every_client() -> None:
    with pytest.raises(UserError, match="no weight"):
        Weighted(weights={"c0": 1.0}).init(PUBLIC)
    with pytest.raises(UserError, match="finite"):
        Weighted(weights={"c0": -1.0})


@pytest.mark.parametrize("mechanism", ["client-secure-aggregation", "client-central"])
@pytest.mark.parametrize("aggregation", [Weighted(), NoiseAware(), Momentum(NoiseAware())])
def test_sums_refuse_weights_before_anything_is_spent(
    mechanism: str, aggregation: Weighted | NoiseAware | Momentum, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="their sum"):
        simulate(Composed(Fixed(), MECHANISMS[mechanism], aggregation), tmp_path)


def test_equal_given_weights_are_fine_for_a_sum() -> None:
    rule = Weighted(weights=dict.fromkeys(NAMES, 2.0))
    assert not rule.needs_individuals
    opened = ReleasedSum(0, torch.ones(2), {}, NoiseFacts(0.0, 1.0), 4.0)
    assert torch.equal(rule.combine(rule.init(PUBLIC), torch.zeros(2), opened)[0], torch.ones(2))


def test_momentum_adds_up() -> None:
    rule = Momentum(Mean(), 0.5)
    state, model = rule.init(PUBLIC), torch.zeros(2)
    opened = (Released("c0", 0, torch.ones(2), {}, NoiseFacts(0.0, 1.0)),)
    seen = []
    for _ in range(3):
        model, state = rule.combine(state, model, opened)
        seen.append(model[0].item())
    assert seen == [1.0, 2.5, 4.25]


@pytest.mark.parametrize("make", [lambda: Momentum(beta=1.0), lambda: NoiseAware(memory=1.0)])
def test_bad_settings(make: object) -> None:
    with pytest.raises(UserError):
        make()  # type: ignore[operator]
