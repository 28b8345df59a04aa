"""The two output distributions that neighbouring data can lead to, for one Poisson-sampled Gaussian release.

With noise z and a unit bound the pairs (P, Q) are mixtures of normals (R6; Zhu, Dong & Wang 2022):
  remove   P = (1−q)·N(0,z²) + q·N(1,z²)    Q = N(0,z²)
  add      the same, swapped
  replace  P = (1−q)·N(0,z²) + q·N(−1,z²)   Q = (1−q)·N(0,z²) + q·N(1,z²)
Zero-out and add-remove need the worse of remove and add; replace is its own mirror image. The privacy loss
ln P/Q is monotone in x, so every question about it becomes one about normal tails.

A group of k units that are sampled independently moves the sum by up to as many bounds as were drawn of it, so
remove has P = Σ_j Bin(k, q)(j)·N(j, z²) (Ganesh 2024); add is the same, swapped (R18).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom

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
    group: int = 1  # units that are blanked together; more than one only for remove and add, at q < 1

    @cached_property
    def _drawn(self) -> tuple[tuple[float, float], ...]:
        """(weight, centre) of the normals with the group's units in the data."""
        if self.group == 1:
            return ((1 - self.q, 0.0), (self.q, 1.0))
        return tuple((float(binom.pmf(j, self.group, self.q)), float(j)) for j in range(self.group + 1))

    @property
    def _first(self) -> tuple[tuple[float, float], ...]:
        """P as (weight, centre) of its normals."""
        match self.direction:
            case Direction.REMOVE:
                return self._drawn
            case Direction.ADD:
                return ((1.0, 0.0),)
        return ((1 - self.q, 0.0), (self.q, -1.0))

    @property
    def _second(self) -> tuple[tuple[float, float], ...]:
        return ((1.0, 0.0),) if self.direction is Direction.REMOVE else self._drawn

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
        """ln(1 − q + q·e^{(2x−1)/(2z²)}), or ln Σ_j w_j·e^{(2jx−j²)/(2z²)} of a group."""
        if self.group > 1:
            return self._log_group_lift(x)
        ratio = (2 * x - 1) / (2 * self.z**2)
        if self.q == 1:
            return np.asarray(ratio)
        small = np.log1p(self.q * np.expm1(np.minimum(ratio, 30.0)))
        return np.asarray(np.where(ratio < 30, small, np.logaddexp(math.log1p(-self.q), math.log(self.q) + ratio)))

    def _log_group_lift(self, x: FloatArray) -> FloatArray:
        exponents = [(2 * j * x - j * j) / (2 * self.z**2) for _, j in self._drawn]
        weights = [w for w, _ in self._drawn]
        grown = sum(w * np.expm1(np.minimum(e, 30.0)) for w, e in zip(weights, exponents, strict=True))
        terms = [math.log(w) + e for w, e in zip(weights, exponents, strict=True) if w > 0]
        near = (np.max(exponents, axis=0) < 30) & (grown > -0.5)  # elsewhere 1 + grown would lose digits
        return np.asarray(np.where(near, np.log1p(np.maximum(grown, -0.5)), np.logaddexp.reduce(terms, axis=0)))

    def _x_of_group_lift(self, lift: FloatArray) -> FloatArray:
        """Newton's method on g(x) = ln Σ_{j≥1} (w_j/w_0)·e^{(2jx−j²)/(2z²)} = ln(e^lift/w_0 − 1), from the right.

        g rises and is convex, so the steps descend to the root; its slope stays between 1/z² and k/z².
        """
        log_none = self.group * math.log1p(-self.q)
        with np.errstate(divide="ignore", invalid="ignore"):
            above = lift - log_none
            target = np.where(
                above > 30, above + np.log1p(-np.exp(-np.maximum(above, 1.0))), np.log(np.expm1(above))
            )
        target = np.where(above > 0, target, -np.inf)
        centres = np.array([j for w, j in self._drawn[1:] if w > 0])
        logs = np.array([math.log(w) - log_none for w, _ in self._drawn[1:] if w > 0])
        x = np.min([self.z**2 * (target - a) / j + j / 2 for a, j in zip(logs, centres, strict=True)], axis=0)
        inside = np.isfinite(x)
        for _ in range(60):
            at = x[inside]
            terms = [a + (2 * j * at - j * j) / (2 * self.z**2) for a, j in zip(logs, centres, strict=True)]
            value = np.logaddexp.reduce(terms, axis=0)
            slope = sum(j * np.exp(t - value) for t, j in zip(terms, centres, strict=True)) / self.z**2
            step = (value - target[inside]) / slope
            x[inside] = at - step
            if not len(step) or float(np.max(np.abs(step) / (np.abs(at) + self.z))) < 1e-15:
                break
        return np.asarray(x)

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
        if self.group > 1:
            return self._x_of_group_lift(lift)
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
        share = tail / (self.group + 1)
        ends = [-float(ndtri(share)) * self.z]
        ends += [j - float(ndtri(share / w)) * self.z for w, j in self._drawn[1:] if share < w]
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
                end, far = min(end, self.group * (order + 1) + reach), -reach
            case Direction.ADD:
                # The integrand is log-concave with its peak at x = −order·(share of the second hump), which the
                # fast decay of that share keeps near zero.
                odds = order * self.group * self.q / (1 - self.q) ** self.group / z**2
                peak = min(self.group * order, z * z * max(1.0, math.log(odds)))
                end, far = max(end, -peak - reach), reach
            case _:
                end, far = max(end, -2 * order - 1 - reach), 1 + reach
        step = min(z / 4, z * z / (3 * self.group))
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
