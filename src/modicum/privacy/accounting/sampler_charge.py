"""What integer noise, the sums it hides in and a capacity leave to chance, in δ (R12, R16).

A table of Skellam's distribution is within a known total variation distance τ of it. Releases whose draws are
together within τ of exact ones, which would be (ε, δ′)-private, are (ε, δ′ + (1 + e^ε)·τ)-private. A sum that is
rounded as a whole moves further than its bound with probability `FAILURE_PROBABILITY` a release; a sum over more
than `ALL_MASK` clients is masked along a drawn graph, which lets parts of it be opened with probability `GRAPH`.
δ pays for both. So exact noise is priced at δ·(1 − `SHARE`), and all of this must fit into the rest.

A capacity leaves somebody out on account of one unit with probability p a release. Others' coins have one law in
both worlds and divergences are jointly convex, so T releases cost T·p in δ beside what sampling without a capacity
costs; that is priced at δ − T·p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from modicum.errors import UnsoundError
from modicum.privacy.accounting.skellam_tables import delta_charge, distance
from modicum.privacy.events import Release
from modicum.privacy.integer_noise import Rounding
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.views import ALL_MASK

SHARE = 1e-3  # of δ: at ε = 1 it changes ε by less than 1e-4
GRAPH = 2.0**-60
FAILURE_PROBABILITY = (
    2.0**-60
)  # of a release whose sum is rounded as a whole: that one unit moves it by more than its `square`


def draws_distance(releases: Iterable[Release | PlannedRelease]) -> float:
    """τ: how far all draws that count are from exact ones. Noise that is not counted may be anything."""
    return math.fsum(
        distance(r.integers.share) * r.integers.dimension * r.integers.honest * r.count
        for r in releases
        if r.integers is not None
    )


def rounding_failure(releases: Iterable[Release | PlannedRelease]) -> float:
    """The chance that rounding takes one unit further than its bound, in all releases together."""
    return FAILURE_PROBABILITY * sum(
        r.count for r in releases if r.integers is not None and r.integers.rounding is Rounding.SUM
    )


def graph_failure(clients: int) -> float:
    """The chance that the graph of one sum over so many clients lets less than all of it be opened."""
    return GRAPH if clients > ALL_MASK else 0.0


def failures(releases: Iterable[Release | PlannedRelease]) -> float:
    """The chance that rounding or a graph fails, in all releases together."""
    releases = tuple(releases)
    graphs = sum(graph_failure(r.integers.clients) * r.count for r in releases if r.integers is not None)
    return rounding_failure(releases) + graphs


def overflow(releases: Iterable[Release | PlannedRelease]) -> float:
    """T·p: the chance that a capacity leaves somebody out on account of one unit, in all releases together."""
    return math.fsum(r.sampler.overflow * r.count for r in releases)


def charge(releases: Iterable[Release | PlannedRelease], epsilon: float) -> float:
    """What draws, rounding, graphs and capacities add to δ at this ε."""
    releases = tuple(releases)
    tau = draws_distance(releases)
    return (delta_charge(tau, 1, 1, 1, epsilon) if tau else 0.0) + failures(releases) + overflow(releases)


def exact_delta(releases: Iterable[Release | PlannedRelease], delta: float) -> float:
    """The part of δ at which noise is priced as if it were exact, and capacities as if they never overflowed."""
    releases = tuple(releases)
    left = delta * (1 - SHARE) if any(r.integers is not None for r in releases) else delta
    left -= overflow(releases)
    if not left > 0:
        raise UnsoundError(
            f"a capacity of so few rows overflows too often for δ={delta:g}: plan more rows, or use lanes"
        )
    return left


def largest_epsilon(releases: Iterable[Release | PlannedRelease], delta: float, units: int = 1) -> float:
    """The ε at which the charge fills the part of δ that is kept for it, for so many units together."""
    releases = tuple(releases)
    tau = draws_distance(releases)
    return math.log(max(1.0, (SHARE * delta - units * failures(releases)) / tau - 1)) if tau else math.inf


def refuse_uncertain(releases: Iterable[Release | PlannedRelease], epsilon: float, delta: float) -> None:
    """Refuses an ε so large that the draws could add more to δ than is kept for them."""
    most = largest_epsilon(tuple(releases), delta)
    if epsilon > most:
        raise UnsoundError(
            f"integer noise is drawn too coarsely to certify ε={epsilon:.4g} at δ={delta:g}; it reaches about "
            f'{most:.3g}: lower the budget, or set noise = "float"'
        )
