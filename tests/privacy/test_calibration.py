import math
from dataclasses import replace

import numpy as np
import pytest

from modicum.errors import UserError
from modicum.privacy import accounting
from modicum.privacy.accounting.calibration import (
    DIGITS,
    calibrate_noise,
    largest_rate,
    largest_steps,
)
from modicum.privacy.events import NoSampling, Poisson, Shuffled
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, TrustedServer, Unit
from modicum.privacy.views import KnownTo

RECORD = PrivacySpec(unit=Unit.RECORD)
PAC_DP = Poisson(128 / 1200, KnownTo.CLIENT)


def cost(spec, z, sampler, count, also=()):
    return accounting.epsilon([PlannedRelease("update", z, sampler, count), *also], spec).epsilon


@pytest.mark.parametrize(("epsilon", "z"), [(0.1, 112.5), (1, 13.7), (5, 3.37)])
def test_oracles(epsilon, z):
    assert calibrate_noise(RECORD, epsilon, PAC_DP, 1172) == pytest.approx(z, rel=2e-3)


SPECS = [
    RECORD,
    replace(RECORD, adjacency=Adjacency.ADD_REMOVE),
    replace(RECORD, adjacency=Adjacency.REPLACE_ONE),
    PrivacySpec(unit=Unit.CLIENT, view=SecureAggregation(20, 2), delta=1e-4),
    PrivacySpec(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, view=TrustedServer(), delta=1e-4),
    PrivacySpec(unit=Unit.CLIENT, delta=1e-4),
]
SAMPLERS = [NoSampling(), Poisson(0.02, KnownTo.CLIENT), Poisson(0.3, KnownTo.SERVER)]
METRICS = (PlannedRelease("accuracy", 60.0, NoSampling(), 20),)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.unit}-{s.adjacency}-{s.view.to_dict()['kind']}")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: str(s.to_dict()))
@pytest.mark.parametrize("also", [(), METRICS], ids=["alone", "with metrics"])
@pytest.mark.parametrize("epsilon", [0.7, 20.0])
def test_within_budget_and_not_wasteful(spec, sampler, also, epsilon):
    if isinstance(spec.view, SecureAggregation):
        also = tuple(replace(m, noise_multiplier=m.noise_multiplier / math.sqrt(18)) for m in also)
    z = calibrate_noise(spec, epsilon, sampler, 300, also=also)
    assert cost(spec, z, sampler, 300, also) <= epsilon
    assert cost(spec, z * (1 - 8e-4), sampler, 300, also) > epsilon
    assert float(f"{z:.{DIGITS}g}") == z


def test_a_share_behind_secure_aggregation():
    alone = PrivacySpec(unit=Unit.CLIENT)
    together = PrivacySpec(unit=Unit.CLIENT, view=SecureAggregation(26, 1))
    z = calibrate_noise(alone, 1.0, NoSampling(), 40)
    assert calibrate_noise(together, 1.0, NoSampling(), 40) == pytest.approx(z / 5, rel=1e-4)


def test_shuffled_passes_cost_more_than_secret_sampling():
    shuffled = calibrate_noise(RECORD, 1.0, Shuffled(), 125)
    secret = calibrate_noise(RECORD, 1.0, PAC_DP, 1172)
    assert shuffled == pytest.approx(math.sqrt(125) / 0.26805, rel=1e-4)
    assert secret < shuffled / 2


def check_random(seed, number):
    generator = np.random.default_rng(seed)
    for _ in range(number):
        q, count = 10 ** generator.uniform(-4, 0), int(10 ** generator.uniform(0, 4.5))
        epsilon, delta = 10 ** generator.uniform(-2, 2.5), 10 ** generator.uniform(-12, -2)
        spec = PrivacySpec(unit=Unit.RECORD, adjacency=list(Adjacency)[generator.integers(3)], delta=delta)
        sampler = Poisson(q, KnownTo.CLIENT)
        z = calibrate_noise(spec, epsilon, sampler, count)
        assert cost(spec, z, sampler, count) <= epsilon, (q, count, epsilon, spec)
        if z > 0.0501:  # the smallest noise that is ever offered
            assert cost(spec, z * (1 - 8e-4), sampler, count) > epsilon, (q, count, epsilon, spec)


def test_random_budgets():
    check_random(seed=5, number=40)


@pytest.mark.soak
def test_random_budgets_in_full():
    check_random(seed=6, number=1000)


def test_steps_and_rate_are_the_largest_that_fit():
    sampler = Poisson(0.05, KnownTo.CLIENT)
    count = largest_steps(RECORD, 2.0, sampler, 1.5)
    assert cost(RECORD, 1.5, sampler, count) <= 2.0 < cost(RECORD, 1.5, sampler, count + 1)
    rate = largest_rate(RECORD, 2.0, sampler, 500, 1.5)
    assert cost(RECORD, 1.5, replace(sampler, rate=rate), 500) <= 2.0
    assert cost(RECORD, 1.5, replace(sampler, rate=rate + 1e-5), 500) > 2.0


def test_steps_beside_metrics():
    alone = largest_steps(RECORD, 1.0, NoSampling(), 30.0)
    assert alone == math.floor(30**2 * 0.26805**2)
    assert largest_steps(RECORD, 1.0, NoSampling(), 30.0, also=METRICS) < alone


def test_unreachable_budgets_say_what_is_reachable():
    spent = accounting.epsilon(METRICS, RECORD).epsilon
    with pytest.raises(UserError, match=f"smallest reachable is {spent:.4g}"):
        calibrate_noise(RECORD, 0.05, PAC_DP, 1172, also=METRICS)
    with pytest.raises(UserError, match="one step alone reaches"):
        largest_steps(RECORD, 0.05, NoSampling(), 1.0)
    with pytest.raises(UserError, match="at any rate"):
        largest_rate(RECORD, 0.01, PAC_DP, 10**6, 0.3)
    with pytest.raises(UserError, match="R5"):
        largest_rate(RECORD, 1.0, Poisson(0.1, KnownTo.SERVER), 10, 1.0)


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf])
def test_bad_budget(epsilon):
    with pytest.raises(UserError, match="budget"):
        calibrate_noise(RECORD, epsilon, PAC_DP, 10)


@pytest.mark.parametrize("count", [0, -3, 1.5, math.nan])
def test_bad_count(count):
    with pytest.raises(UserError, match="steps"):
        calibrate_noise(RECORD, 1.0, PAC_DP, count)
