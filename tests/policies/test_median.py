"""The median of debiased norms stays near the truth; the naive one diverges on the same releases."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
import torch

from modicum.core.facts import PublicFacts
from modicum.core.messages import NoiseFacts, Opened, Released, ReleasedSum
from modicum.core.parts import Observation, Policy, State
from modicum.errors import UserError
from modicum.policies import MedianNorm, NaiveMedianNorm
from modicum.policies.median import _square
from modicum.policies.releases import releases_of

PUBLIC = PublicFacts((), 1, 1, {})
DIMENSION, CLIENTS = 500, 15


def releases(norm: float, C: float, z: float, gain: float, seed: int) -> tuple[Released, ...]:
    """Updates of this norm, clipped to C, with noise z·C a coordinate, then stretched by `gain`."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(CLIENTS):
        direction = torch.randn(DIMENSION, generator=generator, dtype=torch.float64)
        signal = direction / direction.norm() * min(norm, C)
        noise = z * C * torch.randn(DIMENSION, generator=generator, dtype=torch.float64)
        out.append(Released(f"c{i}", 0, gain * (signal + noise), {}, NoiseFacts((gain * z * C) ** 2, gain)))
    return tuple(out)


def follow(
    policy: Policy, norm: float, z: float, rounds: int = 40, gain: float = 1.0, seed: int = 0
) -> list[float]:
    state, bounds = policy.init(PUBLIC), []
    for round in range(rounds):
        decisions = policy.decide(state, round, ["a"])
        bounds.append(decisions["a"].bound)
        opened = releases(norm, bounds[-1], z, gain, seed=1000 * seed + round)
        state = policy.observe(state, Observation(round, opened, decisions))
    return bounds


@pytest.mark.parametrize("gain", [1.0, 0.05])
@pytest.mark.parametrize("start", [30.0, 0.04], ids=["above", "below"])
def test_finds_the_median_norm(start: float, gain: float) -> None:
    bounds = follow(MedianNorm(start * 2.0, headroom=1.25), norm=2.0, z=0.02, gain=gain)
    assert bounds[-1] == pytest.approx(2.5, rel=0.1)


def test_at_most_a_factor_of_two_a_round_and_100_in_all() -> None:
    for norm in (1e-6, 1e6):
        bounds = follow(MedianNorm(1.0, headroom=3.0), norm=norm, z=0.0)
        assert all(0.5 <= b / a <= 2 for a, b in pairwise(bounds))
        assert bounds[-1] == pytest.approx(0.01 if norm < 1 else 100.0)


def test_keeps_the_bound_when_noise_drowns_the_norms() -> None:
    """Three standard errors: fewer than 1 in 700 rounds moves it by chance, so 5 runs of 40 hardly do."""
    for seed in range(5):
        assert set(follow(MedianNorm(1.0, headroom=2.0, doubt=3.0), norm=0.1, z=2.0, seed=seed)) == {1.0}


def test_the_naive_median_diverges_on_the_same_releases() -> None:
    """‖noise‖ = z·C·√d = 6.7·C: the bound grows by about that much every round."""
    naive = follow(NaiveMedianNorm(1.0), norm=1.0, z=0.3, rounds=10)
    growth = naive[5] / naive[4]
    assert growth == pytest.approx(0.3 * math.sqrt(DIMENSION), rel=0.1)
    assert naive[-1] > 1e6
    assert max(follow(MedianNorm(1.0), norm=1.0, z=0.3, rounds=10)) <= 1.0


def test_of_a_sum_the_one_norm_counts() -> None:
    policy = MedianNorm(1.0)
    update = torch.zeros(DIMENSION, dtype=torch.float64)
    update[0] = 0.8
    opened: Opened = ReleasedSum(0, update, {}, NoiseFacts(0.0, 1.0), 10.0)
    state = policy.observe(policy.init(PUBLIC), Observation(0, opened, {}))
    assert state["bound"] == pytest.approx(0.8)


@pytest.mark.parametrize("settings", [{"initial": 0.0}, {"headroom": 0.0}, {"step": 1.0}, {"reach": math.inf}])
def test_bad_settings(settings: dict[str, float]) -> None:
    with pytest.raises(UserError):
        MedianNorm(**settings)


class FollowsTheEstimate(MedianNorm):
    """A negative control: it goes wherever an estimate points that stands out of the quietest client's noise."""

    def observe(self, state: State, observed: Observation) -> State:
        known = [_square(r) for r in releases_of(observed)]
        square = statistics.median(value for value, _ in known)
        if not square > min(error for _, error in known) / math.sqrt(len(known)):
            return state
        target = self.headroom * min(math.sqrt(square), state["bound"])
        return {"bound": min(max(target, state["bound"] / self.step), state["bound"] * self.step)}


def highest(policy: MedianNorm, seed: int) -> float:
    """The highest bound in 60 rounds with a weak signal and unequal noise."""
    generator = torch.Generator().manual_seed(seed)
    state, top = policy.init(PUBLIC), 0.0
    for round in range(60):
        C = policy.decide(state, round, ["a"])["a"].bound
        top = max(top, C)
        opened = []
        for i in range(CLIENTS):
            z = (0.5, 1.0, 2.0)[i % 3]
            update = z * C * torch.randn(DIMENSION, generator=generator, dtype=torch.float64)
            update[0] += min(0.2, C)
            opened.append(Released(f"c{i}", round, update, {}, NoiseFacts((z * C) ** 2, 1.0)))
        state = policy.observe(state, Observation(round, tuple(opened), {}))
    return top


def test_noise_does_not_carry_the_bound_up() -> None:
    """Fixed seeds; noise alone passes three standard errors in about one round of a thousand."""
    sound = [highest(MedianNorm(1.0, headroom=4.0, doubt=3.0), seed) for seed in range(5)]
    broken = [highest(FollowsTheEstimate(1.0, headroom=4.0), seed) for seed in range(5)]
    assert max(sound) <= 2.0
    assert max(broken) > 8.0
