"""The price of a choice, held against the exact law of the best of K noisy scores, and its certificate."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from modicum.errors import UserError
from modicum.privacy.accounting import gdp
from modicum.privacy.accounting.selection import (
    ORDERS,
    Curve,
    Stopping,
    best_stopping,
    curve,
    split_epsilon,
    stopping_epsilon,
    threefold_epsilon,
)
from modicum.privacy.chosen import FILE, Choice, price
from modicum.privacy.events import NoSampling, Poisson
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.second_opinion import stopping_epsilon as library
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit
from modicum.privacy.verify import verify
from modicum.privacy.views import KnownTo

DELTA = 1e-5
SPEC = PrivacySpec(unit=Unit.RECORD, delta=DELTA)
LAWS = [Stopping(0.0, 9.0), Stopping(0.5, 9.0), Stopping(1.0, 9.0), Stopping(math.inf, 9.0)]
GRID = np.linspace(-9, 10, 40001)


def plan(z: float, count: int = 1, spec: PrivacySpec = SPEC, rate: float | None = None) -> PrivacyPlan:
    sampler = NoSampling() if rate is None else Poisson(rate, KnownTo.CLIENT)
    return PrivacyPlan(client="a", spec=spec, budget=9.0, releases=(PlannedRelease("g", z, sampler, count),))


def weights(law: Stopping, most: int = 4000) -> np.ndarray:
    """P(K = k) for k = 0, 1, …, from the definitions."""
    k = np.arange(most + 1)
    if math.isinf(law.shape):
        logs = -law.mean + k * math.log(law.mean) - np.array([math.lgamma(i + 1) for i in k])
        return np.exp(logs)
    gamma, shape = law.gamma, law.shape
    found = np.zeros(most + 1)
    if shape == 0:
        found[1:] = (1 - gamma) ** k[1:] / (k[1:] * math.log(1 / gamma))
    else:
        logs = [math.lgamma(i + shape) - math.lgamma(i + 1) - math.lgamma(shape) for i in k[1:]]
        found[1:] = np.exp(np.array(logs) + k[1:] * math.log1p(-gamma)) / (gamma**-shape - 1)
    return found


def best_of(law: Stopping, shift: float) -> np.ndarray:
    """Density of the best of K scores from N(shift, 1): G'(F)·f."""
    below, own = norm.cdf(GRID - shift), norm.pdf(GRID - shift)
    weight, total = weights(law), np.zeros_like(GRID)
    for k in np.flatnonzero(weight > 1e-14):
        if k:
            total += weight[k] * k * below ** (k - 1)
    return total * own


def epsilon_of(one: np.ndarray, other: np.ndarray, delta: float = DELTA) -> float:
    """The exact ε of two densities at δ, in the worse direction; `inf` where no ε up to 60 is enough."""

    def beyond(epsilon: float) -> float:
        step = GRID[1] - GRID[0]
        pairs = ((one, other), (other, one))
        return max(float(np.clip(p - math.exp(epsilon) * q, 0, None).sum() * step) for p, q in pairs)

    low, high = 0.0, 60.0
    if beyond(high) > delta:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("mu", [0.1, 0.3, 1.0])
def test_an_exact_attack_on_the_winner_stays_under_the_claim(law: Stopping, mu: float) -> None:
    """The strongest test there is: the densities of the published score themselves, on neighbouring records."""
    exact = epsilon_of(best_of(law, 0.0), best_of(law, mu))
    claimed = stopping_epsilon(curve(plan(1 / mu)), law, DELTA)
    one_trial = gdp.epsilon_from_mu(mu, DELTA)
    assert one_trial < exact <= claimed
    assert claimed < 3 * exact + 1  # a bound that says nothing would pass as well


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_an_exact_attack_on_the_winners_index_stays_under_the_claim(law: Stopping) -> None:
    """Of two settings a record moves one's score: which of them won, beside its score, or alone."""
    mu, weight = 0.5, weights(law)
    found = []
    for shift in (0.0, mu):
        below = (norm.cdf(GRID) + norm.cdf(GRID - shift)) / 2
        slope = sum(weight[k] * k * below ** (k - 1) for k in np.flatnonzero(weight > 1e-14) if k)
        found.append([slope * norm.pdf(GRID - moved) / 2 for moved in (0.0, shift)])
    claimed = stopping_epsilon(curve(plan(1 / mu)), law, DELTA)
    assert epsilon_of(np.concatenate(found[0]), np.concatenate(found[1])) <= claimed
    wins = [[float(part.sum()) for part in one] for one in found]  # the index alone: two probabilities
    for i in (0, 1):
        assert abs(math.log(wins[1][i] / wins[0][i])) < claimed
    assert wins[1][1] > 1.2 * wins[0][1]  # the attack sees something


def test_an_attack_that_is_told_the_number_of_trials_is_caught() -> None:
    """Negative control: best of a known, large number of trials, claimed as if it were secret."""
    law, mu, many = Stopping(0.0, 9.0), 1.0, 3000
    claimed = stopping_epsilon(curve(plan(1 / mu)), law, DELTA)
    share = weights(law)[many]
    told = [share * many * norm.cdf(GRID - shift) ** (many - 1) * norm.pdf(GRID - shift) for shift in (0.0, mu)]
    # Given that number alone, whoever reads it and the score tells the two apart beyond the claim.
    told = [density / share for density in told]
    assert epsilon_of(told[0], told[1]) > claimed


def test_an_attack_that_reads_which_trial_won_catches_stopping_at_a_good_score() -> None:
    """Negative control: try until a score is good, and publish the number of the trial that was."""
    law, mu, threshold = Stopping(0.0, 9.0), 0.3, 1.22  # good: one trial in nine
    claimed = stopping_epsilon(curve(plan(1 / mu)), law, DELTA)
    good = [1 - norm.cdf(threshold - shift) for shift in (0.0, mu)]
    number = np.arange(1, 3000)
    here, there = (g * (1 - g) ** (number - 1) for g in good)
    beyond = np.clip(here - math.exp(claimed) * there, 0, None).sum()
    assert beyond > 10 * DELTA


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_number_of_trials_has_its_law(law: Stopping) -> None:
    drawn = np.array([law.drawn((i + 0.5) / 20000) for i in range(20000)])
    exact = weights(law)
    assert exact.sum() == pytest.approx(1, abs=1e-9)
    assert float(np.arange(len(exact)) @ exact) == pytest.approx(law.mean, rel=1e-6)
    for k in (0, 1, 2, 5, 20):
        assert (drawn == k).mean() == pytest.approx(exact[k], abs=2e-4)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize(
    "trial",
    [plan(30.0, 20), plan(1.5, 200, rate=0.05), plan(60.0, 20, replace(SPEC, adjacency=Adjacency.REPLACE_ONE))],
)
def test_another_library_finds_the_same(law: Stopping, trial: PrivacyPlan) -> None:
    ours = stopping_epsilon(curve(trial), law, DELTA)
    assert library(trial, law.shape, law.mean) == pytest.approx(ours, rel=0.01)


def test_the_ways_in_their_order() -> None:
    """Random stopping under 3ε under… splitting grows with the list, the others with the mean number alone."""
    trial = plan(30.0, 20)
    law = best_stopping(curve(trial), 9.0, DELTA)
    stopping = stopping_epsilon(curve(trial), law, DELTA)
    assert split_epsilon([trial]) < stopping < split_epsilon([trial] * 9) < threefold_epsilon([trial], 9.0)
    assert threefold_epsilon([trial], 9.0) > 3 * split_epsilon([trial])


def test_what_cannot_be_a_trial_is_refused() -> None:
    with pytest.raises(UserError, match="fixed noise"):
        curve(PrivacyPlan(client="a", spec=SPEC, budget=1.0, guard=Guard.GDP_FILTER))
    with pytest.raises(UserError, match="a mean above 1"):
        Stopping(0.0, 1.0)


def choice(way: str = "stopping") -> Choice:
    plans = (plan(30.0, 20), plan(30.0, 20))
    law = {"stopping": Stopping(0.0, 9.0), "threefold": Stopping(1.0, 9.0), "split": None}[way]
    return Choice(
        way=way,
        simulation=True,
        budget=3.0,
        settings=({"method.lr": 1}, {"method.lr": 2}),
        plans={"a": plans},
        stopping=law,
        epsilon={"a": price(way, plans, law)},
        winner={"method.lr": 2},
        score={"value": 0.9, "noise": 0.01},
    )


@pytest.mark.parametrize("way", ["stopping", "threefold", "split"])
def test_the_certificate_is_recomputed(tmp_path: Path, way: str) -> None:
    value = choice(way).to_dict()
    (tmp_path / FILE).write_text(json.dumps(value))
    assert verify(tmp_path).matches
    seen = "see every message" in verify(tmp_path).clients[0].adversary
    assert seen == (way == "split")  # whoever sees the trials of a hidden search is promised nothing
    assert Choice.read(tmp_path) == choice(way)
    lower = {**value, "epsilon": {"a": value["epsilon"]["a"] * 0.9}}
    for forged in (replace(choice(way), epsilon=lower["epsilon"]), replace(choice(way), winner={"method.lr": 3})):
        (tmp_path / FILE).write_text(json.dumps(forged.to_dict()))
        assert not verify(tmp_path).matches


def test_other_fields_and_words_are_refused(tmp_path: Path) -> None:
    value = choice().to_dict()
    for forged in ({**value, "trials": 7}, {**value, "meaning": "nothing"}, {**value, "way": "split"}):
        (tmp_path / FILE).write_text(json.dumps(forged))
        with pytest.raises(UserError, match="no certificate of a choice"):
            verify(tmp_path)


def test_a_curve_is_the_worst_of_the_list() -> None:
    from modicum.privacy.accounting.selection import largest

    cheap: Curve = curve(plan(60.0, 20))
    dear: Curve = curve(plan(30.0, 20))
    assert largest([cheap, dear]) == dear
    assert len(dear) == len(ORDERS)
