"""The most that any attack can reach: a curve beside every empirical one.

(ε, δ) bounds every test's true positives; a Gaussian bound is tighter where nothing is sampled; the whole privacy
profile δ(ε) is the tightest, a Gaussian's included. The same curve bounds reconstruction: what hits a record more
often than the best blind guess does, at rate κ, hits at most as often as a test with κ false positives
(Balle et al. 2022, Hayes et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from modicum.attacks.bounds import FloatArray
from modicum.privacy.accounting.choose import epsilon_of, plain_mu
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.accounting.gaussians import normal_form
from modicum.privacy.plan import Guard, PrivacyPlan

DELTAS = tuple(10.0**-k for k in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10))  # at which a profile is read


def by_epsilon(fpr: ArrayLike, epsilon: float, delta: float) -> FloatArray:
    """min(e^ε·FPR + δ, 1 − e^−ε·(1 − δ − FPR)) (Kairouz, Oh & Viswanath 2015)."""
    x = np.asarray(fpr, dtype=np.float64)
    if math.isinf(epsilon):
        return np.ones_like(x)
    with np.errstate(over="ignore"):
        steep = np.exp(min(epsilon, 700.0)) * x + delta
    flat = 1 - math.exp(-epsilon) * (1 - delta - x)
    return np.asarray(np.clip(np.minimum(steep, flat), 0.0, 1.0))


def by_mu(fpr: ArrayLike, mu: float) -> FloatArray:
    """Φ(Φ⁻¹(FPR) + μ): the trade-off of Gaussian privacy (Dong et al. 2022)."""
    return np.asarray(ndtr(ndtri(np.asarray(fpr, dtype=np.float64)) + mu))


@dataclass(frozen=True)
class Ceiling:
    """What a client's plan lets any attack reach, as points (ε, δ) of its profile, and μ where it is Gaussian."""

    points: tuple[tuple[float, float], ...]  # ∞ where nothing is promised
    mu: float | None = None

    @property
    def none(self) -> bool:
        """Whether no ε is known at any δ, so that nothing is ruled out."""
        return all(math.isinf(e) for e, _ in self.points)

    def tpr(self, fpr: ArrayLike) -> FloatArray:
        """The largest true-positive rate, by every bound that applies."""
        curves = [by_epsilon(fpr, e, d) for e, d in self.points]
        if self.mu is not None:
            curves.append(by_mu(fpr, self.mu))
        return np.asarray(np.min(curves, axis=0))

    def hits(self, blind: float) -> float:
        """The largest rate of reconstructions that hit, where the best blind guess hits at most at this rate."""
        return float(self.tpr(min(max(blind, 0.0), 1.0)))


NOTHING = Ceiling(((math.inf, 0.0),))


def ceiling_of(plan: PrivacyPlan) -> Ceiling:
    """Of one client: its plan's whole profile; of a filter, the cap that it enforces."""
    if plan.guard is Guard.NONE:
        return NOTHING
    cap = (plan.budget, plan.spec.delta)
    if plan.guard is not Guard.PLAN:
        return Ceiling((cap,))
    groups, adjacency = normal_form(plan.releases, plan.spec), plan.spec.adjacency
    own = (plan_guarantee(plan).epsilon, plan.spec.delta)
    if all(g.rate == 1 for g in groups):
        return Ceiling((own,), plain_mu(groups, adjacency))
    return Ceiling((own, *((epsilon_of(groups, d, adjacency)[0], d) for d in DELTAS)))


def weakest(ceilings: Iterable[Ceiling]) -> Ceiling:
    """One that holds for all: attacks over several clients are bounded by the least private of them."""
    every: Sequence[Ceiling] = list(ceilings)
    if not every or any(c.none for c in every):
        return NOTHING
    return max(every, key=lambda c: float(c.tpr(0.01)))
