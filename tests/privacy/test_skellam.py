"""What integer noise costs: the theorem against the distribution itself, R12's bound against exact sums."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy.special import iv, ive
from scipy.stats import norm

from modicum.errors import UserError
from modicum.privacy import skellam_second_opinion as second
from modicum.privacy.accounting import gdp, skellam
from modicum.privacy.noise.lattice import Lattice

VARIANCES = (4.0, 4.7, 6.0, 10.0, 33.3, 100.0, 1234.5, 1e4, 1e6, 1e8)


def masses(variance: float, reach: int) -> np.ndarray:
    return ive(np.abs(np.arange(-reach, reach + 1)), variance)


def exact_pair(variance: float, shift: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The release without and with the unit, as two mass functions on a box of one or two dimensions."""
    reach = math.ceil(14 * math.sqrt(variance)) + 30
    sides = [(masses(variance, reach), np.roll(masses(variance, reach), k)) for k in shift]
    without, with_it = (np.array(1.0), np.array(1.0))
    for p, q in sides:
        without, with_it = np.multiply.outer(without, p), np.multiply.outer(with_it, q)
    return without.ravel(), with_it.ravel()


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.sum(np.maximum(0.0, p - math.exp(epsilon) * q)))


def test_the_second_opinion_has_an_answer_where_scipy_has_none() -> None:
    """Bessel functions of arguments from about 1e9 on are NaN: unequal budgets behind a sum reach that."""
    assert math.isnan(float(ive(0, 2e9)))
    for variance in (0.99e9, 1.01e9, 2e9, 2.5e10, 1e12):
        assert second.worth(variance, 4) == pytest.approx(math.sqrt(variance / 4), rel=1e-5)
        assert second.worth(variance, 4) < math.sqrt(variance / 4)


SHIFTS = [(1,), (2,), (7,), (1, 1), (3, 1), (0, 4)]


@pytest.mark.parametrize("variance", VARIANCES)
def test_the_largest_step_is_bounded(variance: float) -> None:
    measured = second.measured_step(variance)
    assert measured <= skellam.largest_step(variance)
    assert skellam.largest_step(variance) <= (1 + 1 / variance) / math.sqrt(variance)


def test_the_largest_step_of_the_largest_variance() -> None:
    """η√variance tends to 1; the mutant that squares the variance overflows."""
    assert skellam.largest_step(1e300) * 1e150 == pytest.approx(1.0, rel=1e-13)
    with pytest.raises(OverflowError):
        assert 1e300**2


@pytest.mark.parametrize("variance", VARIANCES[:-2])
def test_a_mutant_that_takes_skellam_for_a_gaussian_is_caught(variance: float) -> None:
    """1/√variance, the Gaussian's own step, is too small."""
    assert second.measured_step(variance) > 1 / math.sqrt(variance)


def test_the_curvature_that_the_proof_needs() -> None:
    for t in (2.3, 4.0, 9.0, 50.0, 400.0, 5000.0):
        x = np.arange(0, int(12 * math.sqrt(t)) + 5)
        curvature = 1 - ive(x + 1, t) * ive(np.abs(x - 1), t) / ive(x, t) ** 2
        assert np.all(curvature <= 1 / t + 1 / (2 * t**2) + 1e-12)
    t = 2.2
    assert t * iv(1, t) / iv(0, t) > t - 1 / 2 - 1 / (4 * t)
    assert 1 / 4 - 1 / (2 * t) - 1 / (16 * t**2) > 0


@pytest.mark.parametrize("variance", [4.0, 9.0, 25.0, 80.0])
@pytest.mark.parametrize("shift", SHIFTS)
def test_the_theorem_against_exact_curves(variance: float, shift: tuple[int, ...]) -> None:
    """In one and two dimensions, both directions, at many ε: the exact δ is under the claimed one."""
    p, q = exact_pair(variance, shift)
    mu = 1 / skellam.gaussian_multiplier(variance, sum(k * k for k in shift))
    for epsilon in np.linspace(0, 6, 25):
        claimed = gdp.delta(float(epsilon), mu)
        assert hockey_stick(p, q, epsilon) <= claimed + 1e-12
        assert hockey_stick(q, p, epsilon) <= claimed + 1e-12


def test_a_mutant_with_a_smaller_shift_is_caught() -> None:
    """Counting a shift of (2, 1) as one of squared norm 4: the exact curve is above the claim somewhere."""
    p, q = exact_pair(25.0, (2, 1))
    mu = 1 / skellam.gaussian_multiplier(25.0, 4)
    assert any(hockey_stick(p, q, e) > gdp.delta(float(e), mu) for e in np.linspace(0, 3, 13))


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.9])
def test_poisson_sampling_is_covered(rate: float) -> None:
    """The theorem's kernels map mixtures to mixtures: sampled integer noise is under the sampled Gaussian."""
    variance, k = 30.0, 3
    p, q = exact_pair(variance, (k,))
    mixed = (1 - rate) * p + rate * q
    m = 1 / skellam.gaussian_multiplier(variance, k * k)
    for epsilon in (0.01, 0.1, 0.3, 1.0):
        cut = (math.log((math.exp(epsilon) - 1 + rate) / rate) + m * m / 2) / m
        over = (1 - rate) * norm.sf(cut) + rate * norm.sf(cut - m) - math.exp(epsilon) * norm.sf(cut)
        assert hockey_stick(mixed, p, epsilon) <= over + 1e-12
        if math.exp(-epsilon) > 1 - rate:
            low = (math.log((math.exp(-epsilon) - 1 + rate) / rate) + m * m / 2) / m
            under = norm.cdf(low) - math.exp(epsilon) * ((1 - rate) * norm.cdf(low) + rate * norm.cdf(low - m))
            assert hockey_stick(p, mixed, epsilon) <= under + 1e-12


ORACLES = [
    (650, 8, 1.0042), (50_890, 8, 1.1284), (50_890, 12, 1.0006), (11 * 10**6, 12, 1.1056),
    (11 * 10**6, 16, 1.0004),
    (2**10, 8, 1.0052), (2**16, 8, 1.1609), (2**16, 12, 1.0008), (2**24, 12, 1.1583), (2**24, 16, 1.0006),
]  # fmt: skip


def rounded(dimension: int, s: int, conditional: bool = True) -> float:
    """Δ₂² of R12."""
    root, worst = math.sqrt(dimension), (1 + math.sqrt(dimension) / s) ** 2
    return min(worst, 1 + dimension / (4 * s * s) + 1 / s + root / (2 * s * s)) if conditional else worst


@pytest.mark.parametrize(("dimension", "power", "ratio"), ORACLES)
def test_the_oracles_of_r12(dimension: int, power: int, ratio: float) -> None:
    s = 2**power
    gaussian = skellam.renyi_epsilon(36, 1.0, 1, 1e12, 100, 1e-5)
    assert gaussian == pytest.approx(8.6434, abs=1e-4)
    found = skellam.renyi_epsilon(36, rounded(dimension, s), dimension, s, 100, 1e-5)
    assert found / gaussian == pytest.approx(ratio, abs=1e-4)


@pytest.mark.parametrize(
    ("dimension", "power", "ratio"), [(1 << 10, 8, 1.17), (1 << 16, 8, 2.46), (1 << 16, 12, 1.083)]
)
def test_the_oracles_of_r12_without_conditional_rounding(dimension: int, power: int, ratio: float) -> None:
    s = 2**power
    found = skellam.renyi_epsilon(36, rounded(dimension, s, False), dimension, s, 100, 1e-5)
    assert found / 8.6434 == pytest.approx(ratio, abs=6e-3)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("variance", [4.0, 10.0, 60.0])
def test_both_renyi_bounds_are_above_the_exact_divergence(variance: float, shift: tuple[int, ...]) -> None:
    p, q = exact_pair(variance, shift)
    square = sum(k * k for k in shift)
    for alpha in (2, 3, 5, 9):
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.where((p > 0) & (q > 1e-280), np.exp(alpha * np.log(p) + (1 - alpha) * np.log(q)), 0.0)
        exact = math.log(float(terms.sum())) / (alpha - 1)
        assert exact <= skellam.renyi(alpha, variance, square, len(shift), 1.0) * (1 + 1e-9)
    for steps, delta in product((1, 40), (1e-3, 1e-9)):
        first = skellam.renyi_epsilon(variance, square, len(shift), 1.0, steps, delta)
        other = second.renyi_epsilon(variance, square, len(shift), steps, delta)
        assert other == pytest.approx(first, rel=3e-2)  # it knows that ‖k‖₁ is whole, and all orders
        assert other <= first * (1 + 1e-12)


@pytest.mark.parametrize(("dimension", "power"), [(650, 8), (50_890, 12), (11_000_000, 16)])
def test_three_opinions_of_one_plan(dimension: int, power: int) -> None:
    """The theorem gives the Gaussian's exact 8.00 where R12 pays 8.64, and the measured step agrees with it."""
    lattice = Lattice(dimension, 2**power)
    square, variance = lattice.square(lattice.steps), 36.0 * 4.0**power
    tight = skellam.epsilon(variance, square, 100, 1e-5)
    renyi = second.renyi_epsilon(variance, square, lattice.dimension, 100, 1e-5)
    assert 8.0 < tight < 8.05
    assert 8.64 < renyi < 8.70
    if variance <= 1e8:
        assert second.measured_delta(variance, square, 100, tight) == pytest.approx(1e-5, rel=1e-3)
        forgotten = skellam.epsilon(variance, lattice.steps**2, 100, 1e-5)
        if lattice.square(lattice.steps) > 1.001 * lattice.steps**2:
            assert second.measured_delta(variance, square, 100, forgotten) > 1.01e-5


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 6.0, 112.5])
@pytest.mark.parametrize("square", [16, 70_000, 2**33])
def test_calibration(multiplier: float, square: int) -> None:
    variance = skellam.variance_for(multiplier, square)
    assert skellam.gaussian_multiplier(variance, square) >= multiplier
    if variance > skellam.SMALLEST_VARIANCE:
        assert skellam.gaussian_multiplier(variance * (1 - 1e-9), square) < multiplier


@pytest.mark.parametrize(
    "bad",
    [
        lambda: skellam.largest_step(3.9),
        lambda: skellam.largest_step(math.nan),
        lambda: skellam.gaussian_multiplier(100.0, 0),
        lambda: skellam.gaussian_multiplier(100.0, 2.5),  # type: ignore[arg-type]
        lambda: skellam.renyi(1, 36.0, 1.0, 10, 256),
        lambda: skellam.renyi(2.5, 36.0, 1.0, 10, 256),  # type: ignore[arg-type]
        lambda: skellam.variance_for(0.0, 100),
    ],
)
def test_refusals(bad: object) -> None:
    with pytest.raises(UserError) as info:
        bad()  # type: ignore[operator]
    assert "\n" not in str(info.value)
