"""Every mechanism stays under its claim. False alarms: 1e-6 for each audit, by the confidence of its bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from modicum.attacks.bounds import largest_rate, least_rate, lower_bounds
from modicum.attacks.canary import Audit, audit
from modicum.core.parts import Mechanism
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.policies.median import MedianNorm
from tests.audits.worlds import SOUND

BUDGET = 10.0


@pytest.mark.parametrize("mechanism", SOUND.values(), ids=SOUND.keys())
def test_a_sound_mechanism_stays_under_its_claim(mechanism: Mechanism) -> None:
    rounds = 2 if mechanism.individuals else 1  # sums have a cohort to compute in each trial
    verdict = audit(Audit(mechanism=mechanism, budget=BUDGET, rounds=rounds, trials=200))
    assert verdict.claimed <= BUDGET
    assert not verdict.broken, verdict.sentence()


@pytest.mark.soak
@pytest.mark.parametrize("budget", [1.0, BUDGET])
@pytest.mark.parametrize("name", list(SOUND))
def test_a_sound_mechanism_stays_under_its_claim_in_full(name: str, budget: float) -> None:
    """And unsampled Gaussians are attacked at their worst case, so most of μ is found: the check has teeth."""
    verdict = audit(Audit(mechanism=SOUND[name], budget=budget, rounds=3, trials=4000, seed=7))
    assert not verdict.broken, verdict.sentence()
    if budget == BUDGET and "Poisson" not in name and "secret" not in name:
        assert verdict.epsilon > 0.6 * verdict.claimed, verdict.sentence()


def test_a_policy_that_learns_is_refused() -> None:
    """It would hear of all trials, which then were one: their counts are no longer binomial."""
    what = Audit(mechanism=RecordLocal(), trials=4, rounds=2)
    audit(what)
    with pytest.raises(UserError, match="not independent"):
        audit(replace(what, policy=MedianNorm(1.0)))


def test_rates_are_exact_binomial_limits() -> None:
    """Against the defining tails: P(X ≥ k | p_low) = P(X ≤ k | p_high) = tail."""
    from scipy.stats import binom

    low, high = float(least_rate(30, 100, 1e-3)), float(largest_rate(30, 100, 1e-3))
    assert binom.sf(29, 100, low) == pytest.approx(1e-3)
    assert binom.cdf(30, 100, high) == pytest.approx(1e-3)
    assert float(least_rate(0, 100, 1e-3)) == 0
    assert float(largest_rate(100, 100, 1e-3)) == 1


def test_the_bounds_hold_for_a_mechanism_whose_loss_is_known() -> None:
    """N(0,1) against N(1,1) is GDP(1): both bounds stay below, and most of μ is found. False alarm: 1e-6."""
    rng = np.random.default_rng(0)
    found = lower_bounds(rng.normal(1, 1, 40_000), rng.normal(0, 1, 40_000), 1e-5, 1 - 1e-6)
    assert 0.85 < found.mu < 1
    assert 0.8 < found.epsilon < 4.3772
    assert found.epsilon_from_mu < 4.3772


def test_the_bounds_catch_a_mechanism_that_claims_too_little() -> None:
    """Negative control: a shift of 2 under a claim of μ = 1."""
    rng = np.random.default_rng(0)
    found = lower_bounds(rng.normal(2, 1, 4_000), rng.normal(0, 1, 4_000), 1e-5, 1 - 1e-6)
    assert found.mu > 1
    assert found.epsilon_from_mu > 4.3772


def test_the_bounds_are_right_as_often_as_they_say() -> None:
    """At 80% confidence at most 20% of bounds may be wrong; 36% in 400 would be an event of less than 1e-6."""
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        found = lower_bounds(rng.normal(1, 1, 200), rng.normal(0, 1, 200), 1e-5, 0.8)
        wrong += found.mu > 1
    assert wrong < 0.2 * 400 + norm.isf(1e-6) * np.sqrt(400 * 0.2 * 0.8)


def test_an_audit_without_trials_is_refused() -> None:
    with pytest.raises(UserError, match="at least 4"):
        lower_bounds([1.0], [0.0], 1e-5, 0.9)
