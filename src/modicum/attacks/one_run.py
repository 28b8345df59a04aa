"""A lower bound on ε from one run with many canaries (Steinke, Nasr & Jagielski 2023).

Each of m canaries is in by a fair coin. From their scores k₊ are guessed in and k₋ out; of r = k₊ + k₋ guesses v
are right. If the mechanism were (ε, δ)-private, v would be at most about Binomial(r, e^ε/(1 + e^ε)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from modicum.attacks.bounds import FloatArray
from modicum.errors import UserError

BETA = 0.05
MAIN = 0.15  # share of the canaries that is guessed: most powerful near a claim of 1 with 1,000 canaries
OTHER = (1.0, 0.5, 0.05)  # further shares, and in each tensor these:
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


def lower_bound(m: int, r: int, v: int, delta: float, beta: float = BETA) -> float:
    """The largest ε that v right guesses of r reject at level β; 0 where they reject none."""
    if not 0 <= v <= r <= m:
        raise UserError(f"of m canaries r are guessed and v of them right, got m={m}, r={r}, v={v}")
    if p_value(m, r, v, 0.0, delta) > beta:
        return 0.0
    low, high = 0.0, 1.0
    while high < LARGEST and p_value(m, r, v, high, delta) <= beta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if p_value(m, r, v, middle, delta) <= beta:
            low = middle
        else:
            high = middle
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
) -> OneRun:
    """The best bound over several tests that divide β: of all canaries, and of those in each tensor.

    Noise that is missing in one tensor shows in the canaries of that tensor and drowns among all of them.
    """
    everything = np.ones(len(scores), dtype=bool)
    rest = [("all", everything, share) for share in OTHER]
    rest += [(name, chosen, share) for name, chosen in groups for share in IN_TENSOR]
    level = (1 - KEPT) * beta / len(rest)
    found = [_one_test(scores, inside, delta, KEPT * beta, "all", everything, MAIN)]
    found += [_one_test(scores, inside, delta, level, *test) for test in rest]
    best = max(found, key=lambda one: one.epsilon)
    return replace(best, beta=beta)


def _one_test(
    scores: FloatArray,
    inside: NDArray[np.bool_],
    delta: float,
    level: float,
    where: str,
    chosen: NDArray[np.bool_],
    share: float,
) -> OneRun:
    """The k highest are guessed in, the k lowest out."""
    mine, coins = scores[chosen], inside[chosen]
    order, k = np.argsort(mine, kind="stable"), max(1, int(len(mine) * share / 2))
    right = int((~coins[order[:k]]).sum() + coins[order[-k:]].sum())
    epsilon = lower_bound(len(mine), 2 * k, right, delta, level)
    return OneRun(len(mine), 2 * k, right, delta, level, epsilon, where)


def most_provable(m: int, delta: float, beta: float = BETA) -> float:
    """What m canaries prove when every guess is right: an audit of that size sees nothing above it."""
    return lower_bound(m, m, m, delta, (1 - KEPT) * beta / len(OTHER))
