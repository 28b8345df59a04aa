import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.errors import UserError
from modicum.privacy.accounting import gdp


@pytest.mark.parametrize(("epsilon", "mu"), [(0.1, 0.03252), (1, 0.26805), (5, 1.12124)])
def test_mu_of_a_budget(epsilon, mu):
    assert gdp.mu_from_epsilon(epsilon, 1e-5) == pytest.approx(mu, abs=5e-6)


def test_one_unit_gaussian():
    assert gdp.epsilon_from_mu(1, 1e-5) == pytest.approx(4.3772, abs=5e-5)


@pytest.mark.parametrize(
    ("sigma", "epsilon"), [(0.8, 104.84), (1, 71.21), (1.3, 45.72), (1.5, 36.10), (2.1, 21.05)]
)
def test_a_hundred_gaussians(sigma, epsilon):
    mu = gdp.compose([sigma] * 100)
    assert gdp.epsilon_from_mu(mu, 50**-1.1) == pytest.approx(epsilon, abs=5e-3)


def exact_delta(epsilon, mu):
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.1, 0.5, 1, 10, 60, 300])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_against_sixty_digits(mu, delta):
    epsilon = gdp.epsilon_from_mu(mu, delta)
    if epsilon == 0:
        assert exact_delta(0, mu) <= delta
        return
    assert exact_delta(epsilon, mu) <= delta * (1 + 1e-9)
    assert exact_delta(epsilon * (1 - 1e-9), mu) > delta * (1 - 1e-6)
    assert exact_delta(epsilon, mu) == pytest.approx(gdp.delta(epsilon, mu), rel=1e-6)


@given(st.floats(-3, 3), st.floats(-12, -0.5))
@settings(max_examples=100, deadline=None)
def test_budget_and_mu_are_inverse(log_epsilon, log_delta):
    epsilon, delta = 10**log_epsilon, 10**log_delta
    mu = gdp.mu_from_epsilon(epsilon, delta)
    spent = gdp.epsilon_from_mu(mu, delta)
    assert spent == pytest.approx(epsilon, rel=1e-6)
    assert gdp.epsilon_from_mu(mu * (1 - 1e-10), delta) <= epsilon


def test_heterogeneous_noise_composes_exactly():
    assert gdp.compose([1, 2, 4]) == pytest.approx(math.sqrt(1 + 1 / 4 + 1 / 16))


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_bad_budgets(bad):
    with pytest.raises(UserError):
        gdp.mu_from_epsilon(bad, 1e-5)


@pytest.mark.parametrize("bad", [0, 1, -0.1, math.nan])
def test_bad_delta(bad):
    with pytest.raises(UserError):
        gdp.epsilon_from_mu(1, bad)
