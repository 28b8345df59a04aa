"""Ceilings and one-run bounds against figures and formulas that others have published."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from modicum.attacks.ceilings import NOTHING, by_epsilon, by_mu, ceiling_of, weakest
from modicum.attacks.one_run import GAUSSIAN_SHARES, audit_scores, lower_bound, most_provable, p_value, refutes
from modicum.core.facts import ClientFacts
from modicum.errors import UserError
from modicum.mechanisms.clear import Clear
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.accounting import gdp


@pytest.mark.parametrize(
    ("epsilon", "one", "tenth"), [(1, 0.0198, 0.00238), (2, 0.0340, 0.00482), (8, 0.255, 0.0772)]
)
def test_gaussian_ceilings(epsilon: float, one: float, tenth: float) -> None:
    """TPR at 1% and 0.1% of a Gaussian with that ε at δ = 1e-5."""
    plan = RecordLocal(steps=1).plan(ClientFacts("c", 10, epsilon, 1), ())
    found = ceiling_of(plan).tpr([0.01, 0.001])
    assert found == pytest.approx([one, tenth], rel=0.01)


def test_epsilon_ceilings() -> None:
    assert by_epsilon(0.01, 1.0, 1e-5) == pytest.approx(0.0272, abs=1e-4)
    assert by_epsilon(0.001, 2.0, 1e-5) == pytest.approx(0.0074, abs=1e-4)
    assert by_epsilon(0.01, 8.0, 1e-5) == pytest.approx(1.0, abs=1e-3)
    assert by_epsilon(0.01, math.inf, 0.0) == 1.0


def test_the_profile_of_sampled_steps_is_under_each_of_its_points_and_above_chance() -> None:
    plan = RecordLocal(batch=10, steps=20).plan(ClientFacts("c", 100, 2.0, 1), ())
    ceiling, fpr = ceiling_of(plan), np.geomspace(1e-3, 1, 20)
    found = ceiling.tpr(fpr)
    assert (found >= fpr - 1e-9).all()
    assert (found <= by_epsilon(fpr, 2.0, 1e-5) + 1e-9).all()
    assert (np.diff(found) >= -1e-9).all()
    assert ceiling.hits(0.01) == pytest.approx(float(ceiling.tpr(0.01)))


def test_a_gaussian_profile_agrees_with_its_trade_off() -> None:
    """The dual of δ(ε) is Φ(Φ⁻¹(FPR) + μ): points of the one lie on tangents of the other."""
    mu = 1.3
    epsilons = np.linspace(0.0, 6, 200)
    deltas = [gdp.delta_from_mu(mu, e) if hasattr(gdp, "delta_from_mu") else _delta(mu, e) for e in epsilons]
    curve = np.min([by_epsilon(0.02, e, d) for e, d in zip(epsilons, deltas, strict=True)])
    assert curve == pytest.approx(float(by_mu(0.02, mu)), abs=1e-3)


def _delta(mu: float, epsilon: float) -> float:
    from scipy.special import ndtr

    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))


def test_without_privacy_there_is_no_ceiling() -> None:
    plan = Clear().plan(ClientFacts("c", 10, 1.0, 1), ())
    assert ceiling_of(plan) is NOTHING
    private = ceiling_of(RecordLocal(steps=1).plan(ClientFacts("c", 10, 1.0, 1), ()))
    assert weakest([private, NOTHING]).none
    assert weakest([private, private]) is private


def published(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """The authors' own loop, which jax_privacy's auditor computes too."""
    q = 1 / (1 + math.exp(-epsilon))
    beta, alpha, total = binom.sf(v - 1, r, q), 0.0, 0.0
    for i in range(1, v + 1):
        total += binom.pmf(v - i, r, q)
        if total > i * alpha:
            alpha = total / i
    return min(float(beta + alpha * delta * 2 * m), 1.0)


@pytest.mark.parametrize(("m", "r", "v"), [(1000, 1000, 700), (1000, 200, 190), (50, 20, 20), (100, 100, 0)])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3])
def test_one_run_p_values_are_the_published_ones(m: int, r: int, v: int, delta: float) -> None:
    for epsilon in (0.1, 1.0, 3.0):
        assert p_value(m, r, v, epsilon, delta) == pytest.approx(published(m, r, v, epsilon, delta), abs=1e-12)
    found = lower_bound(m, r, v, delta)
    if found:
        assert published(m, r, v, found - 1e-6, delta) <= 0.05 + 1e-9
        assert published(m, r, v, found + 1e-6, delta) > 0.05 - 1e-9


def test_all_right_proves_what_is_known() -> None:
    assert lower_bound(100, 100, 100, 0.0) == pytest.approx(3.49, abs=0.005)
    assert lower_bound(1000, 1000, 1000, 0.0) == pytest.approx(5.81, abs=0.005)
    assert most_provable(1000, 1e-5) < 5.81
    assert 9 < most_provable(1000, 1e-5, gaussian=True) < 10


def test_a_bound_from_scores_is_wrong_at_most_as_often_as_it_says() -> None:
    """Randomised response with ε = 1: over 200 runs, at most β = 5% may prove more (false-alarm rate 1e-4)."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        inside = rng.random(400) < 0.5
        told = inside ^ (rng.random(400) < 1 / (1 + math.e))
        wrong += audit_scores(told + 1e-6 * rng.random(400), inside, 0.0).epsilon > 1.0
    assert wrong <= binom.ppf(1 - 1e-4, 200, 0.05)


def published_gaussian(m: int, r: int, v: int, mu: float, beta: float) -> bool:
    """The paper's algorithm with its two lists, as jax_privacy's f-DP auditor computes it too."""
    h, a = [0.0] * (v + 1), [0.0] * (v + 1)
    a[v], h[v] = beta * v / m, beta * (r - v) / m
    for i in range(v - 1, -1, -1):
        h[i] = max(h[i + 1], float(by_mu(a[i + 1], -mu)))
        a[i] = min(1.0, a[i + 1] + i / (r - i) * (h[i] - h[i + 1]))
    return a[0] + h[0] - r / m > 0


@pytest.mark.parametrize(("m", "r", "v"), [(1000, 500, 330), (1000, 200, 190), (50, 20, 20), (100, 100, 0)])
def test_one_run_against_a_gaussian_is_the_published_test(m: int, r: int, v: int) -> None:
    for mu in (0.05, 0.27, 1.0, 2.0):
        for beta in (0.05, 0.01):
            assert refutes(m, r, v, mu, beta) == published_gaussian(m, r, v, mu, beta)
    found = lower_bound(m, r, v, 1e-5, gaussian=True)
    if found:
        mu = gdp.mu_from_epsilon(found, 1e-5)
        assert published_gaussian(m, r, v, mu - 1e-6, 0.05)
        assert not published_gaussian(m, r, v, mu + 1e-6, 0.05)


def right_guesses(mu: float, rng: np.random.Generator, m: int = 1000) -> int:
    """Of the main test, on scores that a Gaussian mechanism gives: N(0, 1) and N(μ, 1)."""
    inside, k = rng.random(m) < 0.5, int(m * GAUSSIAN_SHARES[0] / 2)
    order = np.argsort(inside * mu + rng.standard_normal(m))
    return int((~inside[order[:k]]).sum() + inside[order[-k:]].sum())


def test_power_against_a_gaussian_claim_of_1() -> None:
    """1,000 canaries, 300 runs each: noise three times too small is found in more than 80%, √10 times (a share for
    ten times too many clients) too; sound mechanisms in no more than β (28 of 300: false-alarm rate 1e-3)."""
    mu, rng = gdp.mu_from_epsilon(1.0, 1e-5), np.random.default_rng(0)
    broken = [refutes(1000, 500, right_guesses(3 * mu, rng), mu, 0.04) for _ in range(300)]
    shared = [refutes(1000, 500, right_guesses(10**0.5 * mu, rng), mu, 0.04) for _ in range(300)]
    sound = [refutes(1000, 500, right_guesses(mu, rng), mu, 0.04) for _ in range(300)]
    assert min(np.mean(broken), np.mean(shared)) > 0.86  # 80% would give so many with probability 0.4%
    assert sum(sound) <= 28


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(UserError, match="of m canaries"):
        lower_bound(10, 5, 6, 0.0)
