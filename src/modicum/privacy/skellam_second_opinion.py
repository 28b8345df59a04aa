"""Skellam noise priced a second time, for `verify`: other formulas, other code, nothing in common with the first.

Two ways. `measured_step` looks at the distribution itself where the theorem of accounting/skellam.py argues about
it: tails from scipy's Bessel functions, normal scores, the largest step. `renyi_epsilon` is R12's bound in lattice
units, with its own conversion. Both take variance and square in lattice steps squared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from scipy.special import ive, log_ndtr, ndtri_exp

from modicum.errors import UserError
from modicum.privacy.integer_noise import IntegerNoise

DISTANCE = 2.0**-100  # promised of one draw, in total variation
TOO_FAR = 2.0**-60  # promised of one sum that is rounded as a whole
IN_PARTS = 2.0**-60  # promised of one sum over more than a hundred clients: that parts of it stay hidden
_MEASURED = 1e9  # variance up to which a step is measured: beyond, it differs by under 1e-9, and scipy gives up
_REACH = 12.0  # standard deviations that are looked at; beyond, steps only shrink
_MOST = 1 << 24  # points
ROUNDING = 1e-6  # relative: scipy's Bessel functions and the sums behind a step


def worth(variance: float, square: int) -> float:
    """The multiplier of a Gaussian that this noise is worth, from the measured step."""
    if variance > _MEASURED:
        return math.sqrt(variance / square) * (1 - 1e-9)
    return 1 / (measured_step(variance) * (1 + ROUNDING) * math.sqrt(square))


def delta_taken(noises: Iterable[tuple[IntegerNoise, int]], epsilon: float) -> float:
    """What (noise, count) releases take of δ: inexact draws, roundings too far, graphs that hide too little."""
    taken = 0.0
    for noise, count in noises:
        draws = count * noise.honest * noise.dimension
        taken += draws * DISTANCE * (1 + math.exp(min(epsilon, 700.0)))
        taken += count * TOO_FAR if noise.rounding == "sum" else 0.0
        taken += count * IN_PARTS if noise.clients > 100 else 0.0
    return taken


@lru_cache(maxsize=256)
def measured_step(variance: float) -> float:
    """The largest step of the normal score between neighbouring integers, by looking at all within 12 σ."""
    reach = math.ceil(_REACH * math.sqrt(variance)) + 20
    if reach > _MOST:
        raise UserError(f"a variance of {variance:g} has too many points to look at: ask the Rényi bound")
    # Some way beyond the reach, so that tails are whole where steps are taken.
    mass = ive(np.arange(2 * reach), variance)
    tail = np.cumsum(mass[::-1])[::-1]  # P(X ≥ x)
    below = ndtri_exp(np.log(tail[1 : reach + 1]))  # score of −x − ½, x = 0, 1, …
    return float(max(-2 * below[0], np.max(-np.diff(below))))


def measured_delta(variance: float, square: int, count: int, epsilon: float) -> float:
    """δ at ε of `count` releases, from the measured step."""
    mu = measured_step(variance) * (1 + ROUNDING) * math.sqrt(square * count)
    upper, lower = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(math.exp(upper) * -math.expm1(min(0.0, lower - upper)))


def renyi_epsilon(variance: float, square: int, dimension: int, count: int, delta: float) -> float:
    """R12 with lattice steps as the unit, at all whole orders up to 4096 at once."""
    order = np.arange(2.0, 4097.0)
    ones = min(math.isqrt(dimension * square), square)  # ‖k‖₁ is a whole number
    exact = ((2 * order - 1) * square + 6 * ones) / (4 * variance * variance)
    excess = np.minimum(exact, 1.5 * ones / variance)
    moment = count * (order * square / (2 * variance) + excess)
    log_delta_term = (np.log(1 / delta) - np.log(order)) / (order - 1)
    return float(max(0.0, np.min(moment + log_delta_term + np.log((order - 1) / order))))
