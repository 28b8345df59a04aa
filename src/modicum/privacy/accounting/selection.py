"""What a choice costs (R17): the best of a secret, random number of trials, where nobody sees the others.

Papernot & Steinke (2022): a trial picks a setting, trains, and releases its score; the one with the best score is
published. Its price follows from the RDP curve ρ of one trial and the law of the number K of trials, which is
drawn before the first one and depends on nothing:

- truncated negative binomial with shape η (0: logarithmic, 1: geometric), Theorem 2:
  ρ'(λ) = ρ(λ) + (1+η)·min_λ̂ {(1−1/λ̂)·ρ(λ̂) + ln(1/γ)/λ̂} + ln E[K]/(λ−1)
- Poisson, Theorem 6: ρ'(λ) = ρ(λ) + E[K]·δ̂ + ln E[K]/(λ−1), where a trial is (ln(1 + 1/(λ−1)), δ̂)-private

Beside it two older ways: every trial paid for in full (composition), and 3ε for a geometric number (Liu & Talwar
2019), here with δ by the total variation between a trial and one that is purely private.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq

from modicum.errors import UserError
from modicum.privacy.accounting.choose import epsilon as epsilon_of
from modicum.privacy.accounting.gaussians import hidden_rate
from modicum.privacy.accounting.rdp import epsilon_from_rdp, rdp_sampled_gaussian
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec

ORDERS: tuple[float, ...] = (
    *(1.25, 1.5, 1.75, 2.5),
    *map(float, range(2, 64)),
    *(float(round(64 * 2 ** (k / 4))) for k in range(25)),
)
Curve = tuple[float, ...]
"""ρ of one trial at each of `ORDERS`."""


@dataclass(frozen=True)
class Stopping:
    """The law of the number of trials: its shape η (∞: Poisson, which may be 0) and its mean."""

    shape: float
    mean: float

    def __post_init__(self) -> None:
        least = 0.0 if math.isinf(self.shape) else 1.0
        if not self.shape >= 0 or not least < self.mean <= 1e4:
            raise UserError(
                f"the number of trials has a shape from 0 to inf and a mean above {least:g}, up to 10,000; got "
                f"{self.shape:g} and {self.mean:g}"
            )

    @property
    def gamma(self) -> float:
        """γ of the truncated negative binomial with this mean, rounded to the side that costs more."""
        found = float(brentq(lambda g: self._mean_of(g) - self.mean, 1e-12, 1 - 1e-9, xtol=1e-15, rtol=1e-12))
        return found * (1 - 1e-9)

    def _mean_of(self, gamma: float) -> float:
        if self.shape == 0:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return self.shape * (1 - gamma) / (gamma * -math.expm1(self.shape * math.log(gamma)))

    def drawn(self, uniform: float) -> int:
        """The number of trials for a uniform number in [0, 1): the least k with so much probability up to it."""
        if math.isinf(self.shape):
            return self._poisson(uniform)
        gamma, total, k = self.gamma, 0.0, 0
        weight = (
            (1 - gamma) / math.log(1 / gamma)
            if self.shape == 0
            else self.shape * (1 - gamma) / math.expm1(-self.shape * math.log(gamma))
        )
        while k < 10**6:
            k += 1
            total += weight
            if uniform < total:
                break
            weight *= (1 - gamma) * (k / (k + 1) if self.shape == 0 else (k + self.shape) / (k + 1))
        return k

    def _poisson(self, uniform: float) -> int:
        weight, total, k = math.exp(-self.mean), math.exp(-self.mean), 0
        while uniform >= total and k < 10**6:
            k += 1
            weight *= self.mean / k
            total += weight
        return k

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a Poisson number has the shape null."""
        return {"shape": None if math.isinf(self.shape) else self.shape, "mean": self.mean}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Stopping:
        """Back from `to_dict`."""
        return cls(math.inf if d["shape"] is None else float(d["shape"]), float(d["mean"]))


def curve(plan: PrivacyPlan) -> Curve:
    """ρ of everything that a plan lists. Only plain composition has one here."""
    if plan.guard is not Guard.PLAN:
        raise UserError("trials have a plan with fixed noise: a method whose noise adapts cannot be one (R2)")
    if any(r.integers is not None or r.correlated is not None for r in plan.charged):
        raise UserError('trials have noise of floats, a draw for each release: set [privacy] noise = "float"')
    return tuple(math.fsum(_rho(r, plan.spec, order) for r in plan.charged) for order in ORDERS)


def _rho(release: PlannedRelease, spec: PrivacySpec, order: float) -> float:
    """Replace-one under sampling by the looser bound of R6."""
    rate, z = hidden_rate(release.sampler, spec), spec.charged(release.noise_multiplier)
    return release.sampler.participations(release.count) * rdp_sampled_gaussian(rate, z, order)


def largest(curves: Iterable[Curve]) -> Curve:
    """Of several settings, at each order: a trial picks one of them by a public law, so that none costs more."""
    return tuple(max(at) for at in zip(*curves, strict=True))


def stopping_epsilon(trial: Curve, stopping: Stopping, delta: float) -> float:
    """ε of the best of a secret number of trials, over all orders: nothing adapts."""
    if math.isinf(stopping.shape):
        extra = [stopping.mean * _delta_at(trial, math.log1p(1 / (order - 1))) for order in ORDERS]
    else:
        log_gamma, factor = math.log(1 / stopping.gamma), 1 + stopping.shape
        inner = min((1 - 1 / a) * rho + log_gamma / a for a, rho in zip(ORDERS, trial, strict=True))
        extra = [factor * inner] * len(ORDERS)
    grown = [
        epsilon_from_rdp(rho + more + max(0.0, math.log(stopping.mean)) / (order - 1), order, delta)
        for order, rho, more in zip(ORDERS, trial, extra, strict=True)
    ]
    return min(grown)


def _delta_at(trial: Curve, epsilon: float) -> float:
    """δ̂ of one trial at ε, by the best order (Canonne, Kamath & Steinke 2020)."""
    logs = [
        (a - 1) * (rho - epsilon + math.log1p(-1 / a)) - math.log(a) for a, rho in zip(ORDERS, trial, strict=True)
    ]
    return math.exp(min(0.0, *logs))


def best_stopping(trial: Curve, mean: float, delta: float) -> Stopping:
    """The cheapest law with this mean for such trials: a function of plans alone."""
    shapes = (0.0, 0.5, 1.0, math.inf)
    return min((Stopping(shape, mean) for shape in shapes), key=lambda law: stopping_epsilon(trial, law, delta))


def split_epsilon(plans: Sequence[PrivacyPlan]) -> float:
    """ε of all trials paid for in full, whoever sees them."""
    return epsilon_of([r for plan in plans for r in plan.charged], plans[0].spec).epsilon


def threefold_epsilon(plans: Sequence[PrivacyPlan], mean: float) -> float:
    """3ε₀ for a geometric number of trials (Liu & Talwar 2019), the smallest that δ allows.

    An (ε₀, δ₀)-private trial is within δ₀ in total variation of an ε₀-private one. Of E[K] trials on either side:
    δ = E[K]·δ₀·(1 + e^{3ε₀}).
    """

    def fits(epsilon: float) -> bool:
        own = plans[0].spec.delta / (mean * (1 + math.exp(epsilon)))
        return all(_epsilon_at(plan, own) <= epsilon / 3 for plan in plans)

    low, high = 1e-3, 100.0
    if not fits(high):
        return math.inf
    while high > low * (1 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _epsilon_at(plan: PrivacyPlan, delta: float) -> float:
    """By RDP: a discretised PLD has no such small δ."""
    rhos = curve(plan)
    return min(epsilon_from_rdp(rho, order, delta) for order, rho in zip(ORDERS, rhos, strict=True))
