"""What Skellam noise on integers costs: never more than a Gaussian whose multiplier is a shade smaller.

Skellam(μ) is the difference of two Poissons of mean μ/2 each: symmetric, of variance μ, and sums of independent
ones are Skellam again. A release adds it to every coordinate of an integer vector that one unit moves by k, an
integer vector with ‖k‖² ≤ S ("square" below, in lattice steps).

**Theorem.** For μ ≥ 4 the release is η·√S-GDP, with η² = 2(1 − √(1 − c)) and c = −ln(1 − 1/μ − 1/(2μ²)). Since
η√μ = 1 + O(1/μ), it is as good as a Gaussian with z = 1/(η√S), whatever the number of coordinates.

Proof. Let p, F be the mass and distribution functions, h = Φ⁻¹∘F, D the largest step h(x) − h(x−1).
1. *Steps bound everything.* p is log-concave, so the best tests between X and X + k (k ≥ 1) are thresholds and
   their trade-off is linear between the points (1 − F(x), F(x−k)). G_m is convex, so it is below the trade-off if
   it is at those points: F(x−k) ≥ Φ(h(x) − m), that is h(x) − h(x−k) ≤ m. The sum of k steps is at most kD, so
   m = kD will do; X + k against X is the same by G_m's symmetry, and so is X against X − k, its translate.
   Blackwell gives a kernel from (N(0,1), N(|k|D,1)) to (X, X + k) for every whole k; one kernel for each
   coordinate turns N(0,I) and N(|k|D,I) into the release without and with the unit, and those two are G_{D‖k‖}.
   (So everything known of Gaussians holds: adaptive composition, filters, and mixtures, hence Poisson sampling. A
   random k, from rounding, is covered: each k has its kernel, and telling k only helps a test.)
2. *The largest step is bounded by curvature.* Steps tend to 0 at ±∞: one at a large x is at most
   ln(1 + p(x)/p(x+1))/h(x−1), since −(ln(1 − Φ))' is at least its argument, and p(x)/p(x+1) ≤ 1 + 2(x+1)/μ while h
   grows faster than √x/2; the step at −x equals the one at x, as F(−x) = 1 − F(x−1). So D is attained, say at x.
   Cut the normal's line at h(x−1) and h(x) and go on in steps of D: cells of mass g(x) = p(x) and
   g(x±1) ≥ p(x±1), since neighbouring steps are at most D. Hence, with T = 1 − p(x+1)p(x−1)/p(x)²,
   1 − T ≤ g(x+1)g(x−1)/g(x)² = e^{−D²}·E e^{D(v−u)}, u and v independent normals within the cell, of length D.
   Hoeffding, for u and for v: E e^{D(v−u)} ≤ e^{D⁴/4}. So D² − D⁴/4 ≤ −ln(1 − T) ≤ c if T ≤ 1/μ + 1/(2μ²):
   D² ≤ 2(1 − √(1 − c)), or D² ≥ 2. The latter is impossible: v − u is symmetric, cosh √s is convex in s, and
   E(v−u)² ≤ D²/2, so that E cosh(D(v−u)) ≤ 1 + E(v−u)²·(cosh D² − 1)/D² ≤ 1 + e^{D²}/4 and
   1 − T ≤ e^{−2} + 1/4 < 0.4, yet 1 − T ≥ 0.7.
3. *Curvature.* p(x) = e^{−μ}I_x(μ); let x ≥ 0, by symmetry. φ(t) = t·I_x'(t)/I_x(t) solves tφ' = t² + x² − φ²,
   and at t = μ T = (t² + x² − φ²)/t². With S = √(t² + x²), q = t²/S², the function L = S − q/2 − q/(4S) > 0 has
   (S² − L² − tL')/q = 3/2 − 5q/4 + (1 − 2q)/(2S) − q/(16S²) > 0 wherever S ≥ 2.2, and, for x ≥ 1, everywhere
   (q ≤ 1 − 1/S²); φ > L near t = 0 for x ≥ 1 (their terms in t² are 1/(2x+2) and 1/(2x) − 1/(2x²) − 1/(4x³)), and
   at t = 2.2 for x = 0 (1.602 against 1.586). φ can never cross L downwards afterwards, so φ ≥ L and
   T ≤ (S² − L²)/t² ≤ (S + 1/2)/S² ≤ 1/t + 1/(2t²). ∎

R12's Rényi bound (Agarwal, Kairouz & Liu 2021) is kept as the second, looser way: `verify` needs an opinion that
shares nothing with this page's theorem.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from modicum.errors import UserError
from modicum.privacy.accounting import gdp
from modicum.privacy.accounting.rdp import ORDERS, epsilon_from_rdp
from modicum.privacy.checks import positive, probability, steps

SMALLEST_VARIANCE = 4.0  # lattice steps squared, of the honest noise: the theorem's premise
WHOLE_ORDERS: tuple[int, ...] = tuple(int(a) for a in ORDERS if a == int(a))


def largest_step(variance: float) -> float:
    """η: how far a shift by one lattice step moves the normal score, at most. About 1/√variance."""
    if not (math.isfinite(variance) and variance >= SMALLEST_VARIANCE):
        raise UserError(
            f"integer noise needs a variance of at least {SMALLEST_VARIANCE:g} lattice steps squared, got "
            f"{variance:g}: choose a finer lattice"
        )
    c = -math.log1p(-1 / variance - 0.5 / variance / variance)  # variance² may overflow
    # 2(1 − √(1−c)) without cancellation; the last factor covers the rounding of a handful of operations.
    return math.sqrt(2 * c / (1 + math.sqrt(1 - c))) * (1 + 1e-14)


def gaussian_multiplier(variance: float, square: int) -> float:
    """z of a Gaussian that reveals at least as much as this noise does of a shift with ‖k‖² ≤ square."""
    return (1 - 1e-14) / (largest_step(variance) * math.sqrt(_square(square)))


def epsilon(variance: float, square: int, count: int, delta: float) -> float:
    """ε of `count` releases, by the theorem and the Gaussian's exact curve."""
    z = gaussian_multiplier(variance, square)
    return gdp.epsilon_from_mu(math.sqrt(steps(count)) / z, probability("delta", delta))


def variance_for(multiplier: float, square: int) -> float:
    """The smallest variance (up to 1e-12, on the safe side) that is worth a Gaussian of this multiplier."""
    aim = positive("the noise multiplier", multiplier)
    low = max(SMALLEST_VARIANCE, aim**2 * _square(square))
    if gaussian_multiplier(low, square) >= aim:
        return low
    high = 2 * low
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_multiplier(middle, square) >= aim else (middle, high)
    return high


def renyi(alpha: int, variance: float, square: float, dimension: int, lattice_steps: float) -> float:
    """R12: ρ(α) at a whole order, in units of the normalised vector with `lattice_steps` steps each.

    `variance` and `square` are in those units too: z² for the honest noise, and Δ₂² with its rounding.
    """
    if alpha != int(alpha) or alpha < 2:
        raise UserError(f"Skellam's Rényi bound holds at whole orders from 2 on, got {alpha}")
    mu, s = positive("the variance", variance), positive("the number of lattice steps", lattice_steps)
    two = positive("the squared shift", square)
    one = min(math.sqrt(dimension * two), s * two)  # ‖k‖₁ ≤ √d·‖k‖₂, and ≤ ‖k‖₂² for integers
    excess = min(((2 * alpha - 1) * s * two + 6 * one) / (4 * s**3 * mu**2), 3 * one / (2 * s * mu))
    return alpha * two / (2 * mu) + excess


def renyi_epsilon(
    variance: float,
    square: float,
    dimension: int,
    lattice_steps: float,
    count: int,
    delta: float,
    orders: Iterable[int] = WHOLE_ORDERS,
) -> float:
    """ε of `count` releases by R12 and the improved conversion."""
    return min(
        epsilon_from_rdp(steps(count) * renyi(a, variance, square, dimension, lattice_steps), a, delta)
        for a in orders
    )


def _square(value: int) -> int:
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise UserError(f"a squared shift is a whole number of lattice steps squared, at least 1, got {value}")
    return int(value)
