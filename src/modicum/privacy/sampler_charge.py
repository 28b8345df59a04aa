"""What inexact draws of integer noise cost in δ (R12), and the part of δ that is kept for them.

A table of Skellam's distribution is within a known total variation distance τ of it. Releases whose draws are
together within τ of exact ones, which would be (ε, δ′)-private, are (ε, δ′ + (1 + e^ε)·τ)-private. So exact noise
is priced at δ·(1 − `SHARE`), and what the draws add must fit into the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from modicum.errors import UnsoundError
from modicum.privacy.events import Release
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.skellam_noise import delta_charge, distance

SHARE = 1e-3  # of δ: at ε = 1 it changes ε by less than 1e-4


def draws_distance(releases: Iterable[Release | PlannedRelease]) -> float:
    """τ: how far all draws that count are from exact ones. Noise that is not counted may be anything."""
    return math.fsum(
        distance(r.integers.share) * r.integers.padded * r.integers.honest * r.count
        for r in releases
        if r.integers is not None
    )


def charge(releases: Iterable[Release | PlannedRelease], epsilon: float) -> float:
    """What the draws add to δ at this ε."""
    tau = draws_distance(releases)
    return delta_charge(tau, 1, 1, 1, epsilon) if tau else 0.0


def exact_delta(releases: Iterable[Release | PlannedRelease], delta: float) -> float:
    """The part of δ at which the noise is priced as if it were exact."""
    return delta * (1 - SHARE) if any(r.integers is not None for r in releases) else delta


def largest_epsilon(releases: Iterable[Release | PlannedRelease], delta: float) -> float:
    """The ε at which what the draws add fills the part of δ that is kept for them."""
    tau = draws_distance(releases)
    return math.log(max(1.0, SHARE * delta / tau - 1)) if tau else math.inf


def refuse_uncertain(releases: Iterable[Release | PlannedRelease], epsilon: float, delta: float) -> None:
    """Refuses an ε so large that the draws could add more to δ than is kept for them."""
    most = largest_epsilon(tuple(releases), delta)
    if epsilon > most:
        raise UnsoundError(
            f"integer noise is drawn too coarsely to certify ε={epsilon:.4g} at δ={delta:g}; it reaches about "
            f'{most:.3g}: lower the budget, or set noise = "float" in a simulation'
        )
