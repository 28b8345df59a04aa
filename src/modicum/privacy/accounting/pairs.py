"""The two output distributions that neighbouring data can lead to, for one Poisson-sampled Gaussian release.

With noise z and a unit bound the pairs (P, Q) are mixtures of normals (R6; Zhu, Dong & Wang 2022):
  remove   P = (1−q)·N(0,z²) + q·N(1,z²)    Q = N(0,z²)
  add      the same, swapped
  replace  P = (1−q)·N(0,z²) + q·N(−1,z²)   Q = (1−q)·N(0,z²) + q·N(1,z²)
Zero-out and add-remove need the worse of remove and add; replace is its own mirror image. The privacy loss
ln P/Q is monotone in x, so every question about it becomes one about normal tails.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from modicum.privacy.spec import Adjacency

FloatArray = NDArray[np.float64]


class Direction(StrEnum):
    """From which of two neighbours the loss is measured; both are looked at where they differ."""

    REMOVE = "remove"
    ADD = "add"
    REPLACE = "replace"


def directions(adjacency: Adjacency) -> tuple[Direction, ...]:
    """Those that an adjacency asks for: replace-one is symmetric, the others are not."""
    if adjacency is Adjacency.REPLACE_ONE:
        return (Direction.REPLACE,)
    return (Direction.REMOVE, Direction.ADD)


@dataclass(frozen=True)
class Pair:
    """The two densities that bound one release: Gaussians of multiplier z, sampled at rate q."""

    direction: Direction
    z: float
    q: float

    @property
    def _first(self) -> tuple[tuple[float, float], ...]:
        """P as (weight, centre) of its normals."""
        match self.direction:
            case Direction.REMOVE:
                return ((1 - self.q, 0.0), (self.q, 1.0))
            case Direction.ADD:
                return ((1.0, 0.0),)
        return ((1 - self.q, 0.0), (self.q, -1.0))

    @property
    def _second(self) -> tuple[tuple[float, float], ...]:
        match self.direction:
            case Direction.REMOVE:
                return ((1.0, 0.0),)
            case Direction.ADD:
                return ((1 - self.q, 0.0), (self.q, 1.0))
        return ((1 - self.q, 0.0), (self.q, 1.0))

    def loss(self, x: FloatArray) -> FloatArray:
        """ln P(x)/Q(x)."""
        up = self._log_lift(x)
        match self.direction:
            case Direction.REMOVE:
                return up
            case Direction.ADD:
                return -up
        return self._log_lift(-x) - up

    def _log_lift(self, x: FloatArray) -> FloatArray:
        """ln(1 − q + q·e^{(2x−1)/(2z²)})."""
        ratio = (2 * x - 1) / (2 * self.z**2)
        if self.q == 1:
            return np.asarray(ratio)
        small = np.log1p(self.q * np.expm1(np.minimum(ratio, 30.0)))
        return np.asarray(np.where(ratio < 30, small, np.logaddexp(math.log1p(-self.q), math.log(self.q) + ratio)))

    def x_of_loss(self, loss: FloatArray) -> FloatArray:
        """The inverse of `loss`; ±∞ beyond the range the loss can take."""
        match self.direction:
            case Direction.REMOVE:
                return self._x_of_lift(loss)
            case Direction.ADD:
                return self._x_of_lift(-loss)
        # e^ℓ = (1−q+qc/u)/(1−q+qcu), with u = e^{x/z²} and c = e^{−1/(2z²)}, is quadratic in u.
        lean = (1 - self.q) / self.q * math.exp(1 / (2 * self.z**2)) * np.sinh(loss / 2)
        return np.asarray(-(self.z**2) * (np.arcsinh(lean) + loss / 2))

    def _x_of_lift(self, lift: FloatArray) -> FloatArray:
        if self.q == 1:
            return np.asarray(self.z**2 * lift + 0.5)
        with np.errstate(divide="ignore", over="ignore"):
            grown = np.expm1(np.minimum(lift, 30.0)) / self.q
            log_grown = np.log1p(np.maximum(grown, -1.0))
        large = lift - math.log(self.q) + np.log1p(-(1 - self.q) * np.exp(-np.maximum(lift, 30.0)))
        return np.asarray(self.z**2 * np.where(lift < 30, log_grown, large) + 0.5)

    def far_end(self, tail: float) -> float:
        """The x beyond which (on the side of high loss) P has at most `tail` of its mass."""
        if self.direction is Direction.ADD:
            return float(ndtri(tail)) * self.z
        ends = [-float(ndtri(tail / 2)) * self.z]
        if tail / 2 < self.q:
            ends.append(1 - float(ndtri(tail / (2 * self.q))) * self.z)
        return max(ends) if self.direction is Direction.REMOVE else -max(ends)

    def loss_range(self, tail: float, low_tail: float = 1e-15) -> tuple[float, float]:
        """(lowest, highest) loss, outside which P has at most `low_tail` and `tail` of its mass."""
        near = float(ndtri(low_tail)) * self.z
        low, high = self.loss(
            np.array([near if self.direction is Direction.REMOVE else -near, self.far_end(tail)])
        )
        return float(low), float(high)

    def masses(self, losses: FloatArray) -> tuple[FloatArray, FloatArray, float, float]:
        """P and Q of each cell between consecutive losses, and P below and above them all."""
        x = self.x_of_loss(losses)
        rising = self.direction is Direction.REMOVE
        first = sum(w * _cells(x, c, self.z) for w, c in self._first if w > 0)
        second = sum(w * _cells(x, c, self.z) for w, c in self._second if w > 0)
        sign = 1.0 if rising else -1.0
        below = sum(w * float(ndtr(sign * (x[0] - c) / self.z)) for w, c in self._first)
        above = sum(w * float(ndtr(-sign * (x[-1] - c) / self.z)) for w, c in self._first)
        return np.asarray(first), np.asarray(second), below, above

    def log_moment(self, order: float, tail: float) -> float:
        """ln E_P[e^{order·loss}] without the `tail` of P's mass that has the highest loss, or a little more.

        The trapezoid rule is exponentially accurate on these integrands. Where the cut-off bites, the integrand
        rises towards it, and a sum that counts the end point in full is too large.
        """
        z = self.z
        if self.q == 1:
            shift = 2.0 if self.direction is Direction.REPLACE else 1.0
            return order * (order + 1) * (shift / z) ** 2 / 2
        reach, end = 11 * z, self.far_end(tail)
        match self.direction:
            case Direction.REMOVE:
                end, far = min(end, order + 1 + reach), -reach
            case Direction.ADD:
                # The integrand is log-concave with its peak at x = −order·(share of the second hump), which the
                # fast decay of that share keeps near zero.
                odds = order * self.q / (1 - self.q) / z**2
                end, far = max(end, -min(order, z * z * max(1.0, math.log(odds))) - reach), reach
            case _:
                end, far = max(end, -2 * order - 1 - reach), 1 + reach
        step = min(z / 4, z * z / 3)
        x = end + math.copysign(step, far - end) * np.arange(
            math.ceil(abs(far - end) / step) + 1, dtype=np.float64
        )
        log_first = [math.log(w) - (x - c) ** 2 / (2 * z * z) for w, c in self._first if w > 0]
        exponent = np.logaddexp.reduce(log_first, axis=0) + order * self.loss(x)
        top = float(exponent.max())
        total = float(np.exp(exponent - top).sum()) * step / (z * math.sqrt(2 * math.pi))
        return top + math.log(total)


def _cells(x: FloatArray, centre: float, z: float) -> FloatArray:
    """N(centre, z²) of each interval between consecutive edges (rising or falling), accurate in both tails."""
    t = (x - centre) / z
    tail = ndtr(-np.abs(t))
    same_side = (t[1:] > 0) == (t[:-1] > 0)
    return np.asarray(np.where(same_side, np.abs(tail[1:] - tail[:-1]), 1 - tail[1:] - tail[:-1]))
