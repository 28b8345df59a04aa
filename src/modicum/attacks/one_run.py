"""A lower bound on ε from one run with many canaries (Steinke, Nasr & Jagielski 2023).

Each of m canaries is in by a fair coin. From their scores k₊ are guessed in and k₋ out; of r = k₊ + k₋ guesses v
are right. If the mechanism were (ε, δ)-private, v would be at most about Binomial(r, e^ε/(1 + e^ε)). A plan that
samples nothing claims more, the whole trade-off of a Gaussian, and so many right guesses refute that much sooner
(Mahloujifar, Melis & Chaudhuri 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from modicum.attacks.bounds import FloatArray
from modicum.errors import UserError
from modicum.privacy.accounting import gdp

BETA = 0.05
SHARES = (0.15, 1.0, 0.5, 0.05)  # of the canaries that are guessed: the first test's, then those of further ones
GAUSSIAN_SHARES = (0.5, 1.0, 0.3, 0.05)  # against a Gaussian; fewer guesses could not refute a claim of 8
IN_TENSOR = (1.0, 0.25)
KEPT = 0.8  # of β for the main test; the others divide the rest evenly
LARGEST = 50.0


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """P[Bin(r, p) ≥ v] + 2mδ·max_i P[v > Bin(r, p) ≥ v − i]/i, p = e^ε/(1 + e^ε) (Theorem 5.2)."""
    p = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(v - 1, r, p))
    if v > 0 and delta > 0:
        below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, p))
        tail += 2 * m * delta * float((below / np.arange(1, v + 1)).max())
    return min(1.0, tail)


def refutes(m: int, r: int, v: int, mu: float, beta: float) -> bool:
    """Whether v right guesses of r have a chance of at most β under every mechanism that is GDP(μ).

    `right` and `wrong` bound the expected shares of right and wrong guesses where at least i are right, for i from
    v down to 0; at 0 both must add up to r/m (Mahloujifar et al. 2024, their algorithm 3).
    """
    right, wrong, normal = beta * v / m, beta * (r - v) / m, NormalDist()
    for i in range(v - 1, -1, -1):
        least = normal.cdf(normal.inv_cdf(right) - mu) if 0 < right < 1 else right
        if least <= wrong:
            break  # nor would it change at any smaller i
        right, wrong = min(1.0, right + i / (r - i) * (least - wrong)), least
    return right + wrong > r / m


def lower_bound(m: int, r: int, v: int, delta: float, beta: float = BETA, *, gaussian: bool = False) -> float:
    """The largest ε that v right guesses of r reject at level β; 0 where they reject none.

    With `gaussian` the mechanism claims the trade-off of a Gaussian: of the largest μ that is rejected, ε at δ.
    """
    if not 0 <= v <= r <= m:
        raise UserError(f"of m canaries r are guessed and v of them right, got m={m}, r={r}, v={v}")
    if gaussian:
        mu = _largest(lambda mu: refutes(m, r, v, mu, beta))
        return gdp.epsilon_from_mu(mu, delta) if mu > 0 else 0.0
    return _largest(lambda epsilon: p_value(m, r, v, epsilon, delta) <= beta)


def _largest(rejected: Callable[[float], bool]) -> float:
    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < LARGEST and rejected(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class OneRun:
    """What one run proved."""

    m: int
    guesses: int
    right: int
    delta: float
    beta: float
    epsilon: float
    where: str  # the canaries that proved most: all of them, or those in one tensor


def audit_scores(
    scores: FloatArray,
    inside: NDArray[np.bool_],
    delta: float,
    *,
    beta: float = BETA,
    groups: Sequence[tuple[str, NDArray[np.bool_]]] = (),
    gaussian: bool = False,
) -> OneRun:
    """The best bound over several tests that divide β: of all canaries, and of those in each tensor.

    Noise that is missing in one tensor shows in the canaries of that tensor and drowns among all of them.
    """
    test = partial(_one_test, scores, inside, delta, gaussian)
    everything = np.ones(len(scores), dtype=bool)
    main, *others = GAUSSIAN_SHARES if gaussian else SHARES
    rest = [("all", everything, share) for share in others]
    rest += [(name, chosen, share) for name, chosen in groups for share in IN_TENSOR]
    level = (1 - KEPT) * beta / len(rest)
    found = [test(KEPT * beta, "all", everything, main)]
    found += [test(level, *one) for one in rest]
    best = max(found, key=lambda one: one.epsilon)
    return replace(best, beta=beta)


def _one_test(
    scores: FloatArray,
    inside: NDArray[np.bool_],
    delta: float,
    gaussian: bool,
    level: float,
    where: str,
    chosen: NDArray[np.bool_],
    share: float,
) -> OneRun:
    """The k highest are guessed in, the k lowest out."""
    mine, coins = scores[chosen], inside[chosen]
    order, k = np.argsort(mine, kind="stable"), max(1, int(len(mine) * share / 2))
    right = int((~coins[order[:k]]).sum() + coins[order[-k:]].sum())
    epsilon = lower_bound(len(mine), 2 * k, right, delta, level, gaussian=gaussian)
    return OneRun(len(mine), 2 * k, right, delta, level, epsilon, where)


def most_provable(m: int, delta: float, beta: float = BETA, *, gaussian: bool = False) -> float:
    """What m canaries prove when every guess is right: an audit of that size sees nothing above it."""
    main, *others = GAUSSIAN_SHARES if gaussian else SHARES
    tests = [(main, KEPT * beta), *((share, (1 - KEPT) * beta / len(others)) for share in others)]
    guessed = [(2 * max(1, int(m * share / 2)), level) for share, level in tests]
    return max(lower_bound(m, r, r, delta, level, gaussian=gaussian) for r, level in guessed)
