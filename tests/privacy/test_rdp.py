import math

import mpmath
import pytest

from modicum.errors import UserError
from modicum.privacy.accounting import gdp, pld, rdp
from modicum.privacy.accounting.gaussians import Gaussians
from modicum.privacy.spec import Adjacency

ORACLES = [  # q, z, K, RDP by dp-accounting at δ=1e-5, classic conversion
    (1.0, 1.0, 1, 4.7285, 5.2985),
    (0.01, 4.0, 10_000, 1.0355, 1.2586),
    (256 / 6e4, 1.1, 14_063, 2.5967, 3.0084),
    (0.1, 1.0, 100, 7.9039, 8.8004),
    (0.0128, 1.0, 7_900, 7.8309, 8.6079),
]


def exact_rho(q, z, alpha):
    with mpmath.workdps(40):
        q, z, a = mpmath.mpf(q), mpmath.mpf(z), mpmath.mpf(alpha)

        def integrand(x):
            return (1 - q + q * mpmath.exp((2 * x - 1) / (2 * z * z))) ** a * mpmath.npdf(x, 0, z)

        ends = sorted({-14 * z, -5 * z, mpmath.mpf(0), z, 5 * z, a / 2, a, a + 2 * z, a + 6 * z, a + 14 * z})
        return mpmath.log(mpmath.quad(integrand, ends)) / (a - 1)


@pytest.mark.parametrize(("q", "z", "count", "expected", "classic"), ORACLES)
def test_oracles_and_their_order(q, z, count, expected, classic):
    ours = rdp.epsilon(q, z, count, 1e-5)
    # Fractional orders are exact here and bounded from above in dp-accounting: at most its value.
    assert expected * 0.999 < ours < expected + 5e-5
    plain = min(count * rdp.rdp_sampled_gaussian(q, z, a) + math.log(1e5) / (a - 1) for a in rdp.ORDERS if a < 257)
    assert plain == pytest.approx(classic, rel=2e-3)
    tight = pld.epsilon([Gaussians(z, q, count)], 1e-5, Adjacency.ZERO_OUT)
    assert tight <= ours <= plain


@pytest.mark.parametrize("q", [1e-4, 0.3, 0.9])
@pytest.mark.parametrize("z", [0.3, 1.0, 100.0])
@pytest.mark.parametrize("alpha", [1.02, 2.5, 7.7, 17.0])
def test_against_forty_digits(q, z, alpha):
    exact = float(exact_rho(q, z, alpha))
    assert rdp.rdp_sampled_gaussian(q, z, alpha) == pytest.approx(exact, rel=3e-8)


def test_a_plain_gaussian_is_the_limit_of_full_sampling():
    for alpha in (1.5, 2.0, 17.0, 40.5):
        assert rdp.rdp_sampled_gaussian(1.0, 2.0, alpha) == pytest.approx(alpha / 8)
        assert rdp.rdp_sampled_gaussian(1 - 1e-9, 2.0, alpha) == pytest.approx(alpha / 8, rel=1e-6)


@pytest.mark.parametrize("alpha", [1.3, 2.0, 6.5, 32.0])
def test_monotone_in_rate_and_noise(alpha):
    rates = [rdp.rdp_sampled_gaussian(q, 1.2, alpha) for q in (1e-3, 1e-2, 0.1, 0.5, 0.9, 1.0)]
    noises = [rdp.rdp_sampled_gaussian(0.05, z, alpha) for z in (0.4, 0.8, 1.5, 5.0, 50.0)]
    assert rates == sorted(rates)
    assert noises == sorted(noises, reverse=True)


def test_the_filter_of_the_rules():
    q, z, count = 128 / 1200, 13.69, 1172
    order = rdp.best_order(q, z, count, 1e-5)
    assert order == 17
    spent = count * rdp.rdp_sampled_gaussian(q, z, order)
    assert rdp.epsilon_from_rdp(spent, order, 1e-5) == pytest.approx(1.093, abs=5e-4)
    assert rdp.filter_cap(1.093, 1e-5, order) == pytest.approx(spent, rel=1e-3)
    assert spent <= rdp.filter_cap(1.0935, 1e-5, order)


def test_cap_and_conversion_are_inverse():
    for alpha in (1.5, 4.0, 17.0, 200.0):
        cap = rdp.filter_cap(30.0, 1e-6, alpha)
        assert rdp.epsilon_from_rdp(cap, alpha, 1e-6) == pytest.approx(30.0)


def test_conversion_bounds_the_exact_gaussian():
    for z in (0.3, 1.0, 5.0, 40.0):
        assert rdp.epsilon(1.0, z, 1, 1e-6) >= gdp.epsilon_from_mu(1 / z, 1e-6)


def test_an_order_too_small_for_the_budget_is_refused():
    with pytest.raises(UserError, match="larger order"):
        rdp.filter_cap(0.1, 1e-5, 2)


@pytest.mark.parametrize("args", [(0, 1, 2), (1.5, 1, 2), (0.1, 0, 2), (0.1, math.nan, 2), (0.1, 1, 1)])
def test_bad_input(args):
    with pytest.raises(UserError):
        rdp.rdp_sampled_gaussian(*args)
