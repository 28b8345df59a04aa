"""ε of Poisson-sampled and plain Gaussians from their privacy loss distribution: tight, fast, and a bound.

1. *Discretise* each pair's loss to a grid of width h. The P-mass of a cell goes to its two ends in the split that
   keeps its P- and Q-mass: the tightest pair on that grid that dominates the true one ("connect the dots",
   Doroshenko et al. 2022). Loss below the grid moves up to its first point; mass above it is charged to δ.
2. *Tilt* by e^{λ·loss}, with λ where the Rényi bound is best. The tilted sum has its centre near the ε we look
   for, so that a short window suffices and rounding is relative to δ, not to 1.
3. *Compose* by FFT: the product of powers of the transforms.
4. *Undo the tilt* and solve δ(ε) = δ exactly between grid points.

Every error falls on the safe side:
- Mass above the window would wrap to its bottom and be lost: its Chernoff bound is charged to δ. Mass below wraps
  to the top and only raises ε.
- FFT rounding. In a Cooley–Tukey transform F of length N every input reaches every output along one path of
  log₂N multiplications and additions, so that an output is off by at most e = c·u·log₂N·Σ|p| (u = 2.2e-16; c = 8
  covers a complex multiply-add, the constants in the tables, and the power's own rounding; Higham 2002, §24.1).
  A K-th power is off by K·e·(|F| + e)^{K−1}, and the inverse averages over frequencies. Twice that average is
  added to every point of the tilted result.
- Rounding of the normal tails: each cell's mass is shifted upwards by a share of 1e-13/h, which raises the
  composed loss by at most K·1e-13, and δ is lowered by one part in a million.
The grid is chosen from the second-order effect of step 1 on ε and checked against the exact moment; the result is
typically 0.01% above the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import minimize_scalar
from scipy.signal import lfilter
from scipy.special import ndtr

from modicum.errors import UserError
from modicum.privacy.accounting.gaussians import Gaussians
from modicum.privacy.accounting.pairs import Direction, Pair, directions
from modicum.privacy.checks import probability
from modicum.privacy.spec import Adjacency

FloatArray = NDArray[np.float64]

FINE = 1e-4  # relative overshoot of ε that the grid aims at
COARSE = 2e-3  # for searches that verify with FINE
_TRUNCATED = 1e-4  # share of δ given to the mass above the grid, and above the window
_MAX_POINTS = 1 << 23
_FFT_CONSTANT = 8
_NEGLIGIBLE = -70.0
_SHIFT = 1e-13  # rounding of the normal tails, as a loss per step
_DELTA_ROOM = 1e-6
_MAX_FLOOR = 1e-3  # a larger share of wrapped mass asks for a wider window
_LARGEST_LOG_TILT = 20.0
_FLAT = 1e-5  # a bounded loss has no best tilt: stop where more of it changes nothing
_SMALL_EPSILON = 1e-3  # below this the grid aims at an absolute accuracy
_LARGEST_PLAIN_MU = 5.0  # a plain Gaussian above this is split into equal ones, to stay in floating-point range


def epsilon(groups: Iterable[Gaussians], delta: float, adjacency: Adjacency, *, accuracy: float = FINE) -> float:
    """An upper bound on ε(δ) of all releases together; the worst direction that `adjacency` allows."""
    probability("delta", delta)
    steps = _simplify(groups)
    if not steps:
        return 0.0
    worst = 0.0
    for direction in directions(adjacency):
        worst = max(worst, _epsilon_one_way(steps, delta, direction, accuracy, enough=worst))
    return worst


def epsilon_one_way(
    groups: Iterable[Gaussians], delta: float, direction: Direction, *, accuracy: float = FINE
) -> float:
    """The same for one direction only: not a guarantee by itself under zero-out or add-remove."""
    steps = _simplify(groups)
    return _epsilon_one_way(steps, probability("delta", delta), direction, accuracy) if steps else 0.0


def group_epsilon(
    groups: Iterable[Gaussians], delta: float, adjacency: Adjacency, size: int, *, accuracy: float = COARSE
) -> float:
    """An upper bound on ε(δ) where up to `size` units are blanked together (R18); not for replace-one."""
    if adjacency is Adjacency.REPLACE_ONE:
        raise UserError("no bound for several replaced units under sampling is known here: use zero-out")
    steps = _simplify(Gaussians(g.noise_multiplier / size, 1.0, g.count) if g.rate == 1 else g for g in groups)
    worst = 0.0
    for direction in directions(adjacency):
        worst = max(worst, _epsilon_one_way(steps, probability("delta", delta), direction, accuracy, worst, size))
    return worst


def _simplify(groups: Iterable[Gaussians]) -> tuple[Gaussians, ...]:
    """Sampled groups with equal parameters merged, all plain Gaussians as one (or several equal ones)."""
    counts: dict[tuple[float, float], int] = {}
    precision = 0.0
    for g in groups:
        if math.isinf(g.noise_multiplier):
            continue
        if g.rate == 1:
            precision += g.count / g.noise_multiplier**2
        else:
            key = (g.noise_multiplier, g.rate)
            counts[key] = counts.get(key, 0) + g.count
    steps = [Gaussians(z, q, count) for (z, q), count in counts.items()]
    if precision > 0:
        parts = max(1, math.ceil(precision / _LARGEST_PLAIN_MU**2))
        steps.append(Gaussians(math.sqrt(parts / precision), 1.0, parts))
    return tuple(steps)


def _epsilon_one_way(
    steps: Sequence[Gaussians],
    delta: float,
    direction: Direction,
    accuracy: float,
    enough: float = 0.0,
    size: int = 1,
) -> float:
    """ε in one direction; where it is certain to be at most `enough`, that suffices as an answer."""
    if _total_variation(steps, direction, size) <= delta:
        return 0.0
    try:
        with np.errstate(over="ignore", invalid="raise"):
            found = _bound_one_way(_pairs(steps, direction, size), delta, accuracy, enough)
    except (ValueError, ArithmeticError):  # beyond floating-point numbers
        found = math.nan
    if math.isnan(found):  # which max() and min() would lose
        least = min(g.noise_multiplier for g in steps)
        raise UserError(
            f"no ε can be computed for noise of {least:g} at δ = {delta:g}: take a larger δ or more noise"
        )
    return max(0.0, found)


def _pairs(steps: Sequence[Gaussians], direction: Direction, size: int) -> list[tuple[Pair, int]]:
    """Each kind of release with its count; what is not sampled has the group's size in its noise already."""
    return [(Pair(direction, g.noise_multiplier, g.rate, 1 if g.rate == 1 else size), g.count) for g in steps]


def _bound_one_way(counted: Sequence[tuple[Pair, int]], delta: float, accuracy: float, enough: float) -> float:
    pairs, counts = [pair for pair, _ in counted], [count for _, count in counted]
    tilt, renyi = _renyi_tilt(pairs, counts, delta)
    if renyi <= enough:
        return enough
    scale = max(renyi, 0.05 * math.log(1 / delta) / tilt)
    h = math.sqrt(12 * accuracy * scale / (sum(counts) * (tilt + 1)))
    best = renyi  # a bound by itself, for what the grids below cannot reach
    for _ in range(8):
        try:
            grids = [_discretise(pair, count, h, tilt, delta) for pair, count in zip(pairs, counts, strict=True)]
            found = _compose(grids, counts, h, tilt, delta)
        except _TooLargeError:
            break
        best = min(best, found.epsilon)
        # The split of cells adds variance h²/6 to each step, which moves ε by half of that times the decay of δ.
        overshoot = sum(counts) * h * h / 12 * (found.decay + 1)
        allowed = accuracy * max(found.epsilon, _SMALL_EPSILON)
        if overshoot <= 1.5 * allowed:
            break
        h *= max(0.05, 0.9 * math.sqrt(allowed / overshoot))
    return best


class _TooLargeError(Exception):
    """The grid or window would need too many points."""


def _total_variation(steps: Sequence[Gaussians], direction: Direction, size: int = 1) -> float:
    """δ(0) is at most the sum of each release's: q·(2Φ(s/2z) − 1), with s = 2 for replace; of a group, whatever is
    drawn of it moves the sum by at most its size."""
    shift = 2.0 if direction is Direction.REPLACE else 1.0

    def one(g: Gaussians) -> float:
        if g.rate == 1 or size == 1:
            return g.rate * (2 * float(ndtr(shift / (2 * g.noise_multiplier))) - 1)
        return -math.expm1(size * math.log1p(-g.rate)) * (2 * float(ndtr(size / (2 * g.noise_multiplier))) - 1)

    return math.fsum(g.count * one(g) for g in steps)


def _renyi_tilt(pairs: Sequence[Pair], counts: Sequence[int], delta: float) -> tuple[float, float]:
    """λ at which the Rényi bound on ε is smallest (λ + 1 is its order), and that bound.

    The rarest losses are left out and charged to δ: without them the bound follows the bulk of the loss.
    """
    log_rest = math.log(delta * (1 - len(pairs) * _TRUNCATED))

    def bound(log_order: float) -> float:
        lam = math.exp(log_order)
        moment = sum(k * p.log_moment(lam, _TRUNCATED * delta / k) for p, k in zip(pairs, counts, strict=True))
        return (moment * (1 + 1e-9) - log_rest - math.log1p(lam)) / lam - math.log1p(1 / lam)

    shift = 2.0 if pairs[0].direction is Direction.REPLACE else 1.0
    mu = shift * math.sqrt(math.fsum(k * (p.group / p.z) ** 2 for p, k in zip(pairs, counts, strict=True)))
    start = math.log(math.sqrt(2 * math.log(1 / delta)) / mu)  # right for plain Gaussians, low for sampled ones
    return _lowest(bound, start)


def _lowest(f: Callable[[float], float], start: float) -> tuple[float, float]:
    """e^t and f(t) at the bottom of a single valley, to within a few percent of e^t."""
    low, high, at = start - 1, start + 1, f(start)
    while high < _LARGEST_LOG_TILT and (further := f(high)) < at - _FLAT * abs(at):
        low, high, at = high - 1, high + 1, further
    if high == start + 1:
        while low > -_LARGEST_LOG_TILT and (further := f(low)) < at:
            low, high, at = low - 1, low + 1, further
    found = minimize_scalar(f, bounds=(low, high), method="bounded", options={"xatol": 0.02, "maxiter": 14})
    return math.exp(float(found.x)), float(found.fun)


@dataclass(frozen=True)
class _Grid:
    """A discretised loss: masses at first·h, (first+1)·h, …; `lost` is charged to δ."""

    first: int
    mass: FloatArray
    lost: float


def _discretise(pair: Pair, count: int, h: float, order: float, delta: float) -> _Grid:
    low, high = pair.loss_range(_TRUNCATED * delta / count)
    # Loss far below zero weighs nothing once tilted by e^{λ·loss}; moving it up to here costs nothing.
    low = max(low, -math.log(1e9 * count) / order)
    first, last = math.floor(low / h), math.ceil(high / h)
    if last - first > _MAX_POINTS:
        raise _TooLargeError
    losses = h * np.arange(first, last + 1, dtype=np.float64)
    p, q, below, above = pair.masses(losses)
    upper = (p - q * np.exp(losses[:-1])) / -math.expm1(-h) + p * (_SHIFT / h)
    upper = np.clip(upper, 0.0, p)
    mass = np.zeros(len(losses))
    mass[:-1] = p - upper
    mass[1:] += upper
    mass[0] += below
    return _Grid(first, mass, above)


@dataclass(frozen=True)
class _Composed:
    epsilon: float
    decay: float  # −d ln δ / dε there
    floor: float  # the share of δ that comes from the lowest density in the window: mass that wrapped around


def _compose(grids: Sequence[_Grid], counts: Sequence[int], h: float, lam: float, delta: float) -> _Composed:
    tilted, log_moments, mean, variance = [], [], 0.0, 0.0
    for grid, count in zip(grids, counts, strict=True):
        losses = h * np.arange(grid.first, grid.first + len(grid.mass), dtype=np.float64)
        with np.errstate(divide="ignore"):
            exponent = np.log(grid.mass) + lam * losses
        top = float(exponent.max())
        weights = np.exp(exponent - top)
        total = float(weights.sum())
        weights /= total
        m = float(weights @ losses)
        mean += count * m
        variance += count * float(weights @ (losses - m) ** 2)
        log_moments.append(top + math.log(total))
        tilted.append(weights)
    moment = math.fsum(k * m for k, m in zip(counts, log_moments, strict=True))
    lost = math.fsum(k * g.lost for k, g in zip(counts, grids, strict=True))
    spread = max(math.sqrt(variance), 4 * h)
    # What lies above the window has tilted mass at most 1, which untilted is at most e^{moment − λ·top}.
    top = (moment - math.log(_TRUNCATED * delta)) / lam
    room = delta * (1 - _DELTA_ROOM - sum(counts) * _SHIFT - _TRUNCATED) - lost
    best: _Composed | None = None
    for widen in (1, 2, 4, 8, 16):
        low = math.floor((min(mean, top) - 5 * widen * spread) / h)
        n = next_fast_len(math.ceil((top + 5 * (widen - 1) * spread) / h) - low + 1, real=True)
        if n > _MAX_POINTS:
            break
        density = _fft_power(tilted, [g.first for g in grids], counts, low, n)
        found = _solve(density, low, h, moment, lam, room)
        if found is not None and (best is None or found.epsilon < best.epsilon):
            best = found
        if found is not None and found.floor < _MAX_FLOOR:
            break
    if best is None:
        raise _TooLargeError
    return best


def _fft_power(
    tilted: Sequence[FloatArray], firsts: Sequence[int], counts: Sequence[int], low: int, n: int
) -> FloatArray:
    """The tilted sum at low, …, low+n−1 (in units of h), each point raised by the FFT's error."""
    unit = _FFT_CONSTANT * np.finfo(np.float64).eps * math.log2(n)
    log_bound = np.zeros(n // 2 + 1)  # of the product's size, errors included
    share = np.zeros(n // 2 + 1)  # Σ K·e/|F|: the product's relative error
    transforms, offset = [], 0
    for weights, first, count in zip(tilted, firsts, counts, strict=True):
        padded = np.zeros(-(-len(weights) // n) * n)
        padded[: len(weights)] = weights
        transform = rfft(padded.reshape(-1, n).sum(axis=0))
        size = np.abs(transform) + unit
        log_bound += count * np.log(size)
        share += count * unit / size
        transforms.append(transform)
        offset += first * count
    # High powers vanish at all but a few frequencies; what is left out there is below e^_NEGLIGIBLE and charged.
    alive = log_bound > _NEGLIGIBLE
    product = np.zeros(n // 2 + 1, dtype=np.complex128)
    product[alive] = 1.0
    for transform, count in zip(transforms, counts, strict=True):
        product[alive] *= transform[alive] ** count
    density = np.roll(irfft(product, n), offset - low)
    errors = np.exp(log_bound[alive]) * (share[alive] + unit)
    charge = 4 * float(errors.sum()) / n + math.exp(_NEGLIGIBLE)
    return np.asarray(np.maximum(density, 0.0) + charge)


def _solve(density: FloatArray, low: int, h: float, moment: float, lam: float, delta: float) -> _Composed | None:
    """ε with δ(ε) = delta, or None where the window does not hold it.

    With A_k = Σ_{j≥k} m_j, δ at the grid points obeys δ_k = e^{−h} δ_{k+1} + (1 − e^{−h}) A_{k+1}, a sum of
    positive terms; between points δ(ℓ_k − s) = A_k − (A_k − δ_k) e^{−s}.
    """
    losses = h * np.arange(low, low + len(density), dtype=np.float64)
    mass = density * np.exp(np.minimum(moment - lam * losses, 700.0))
    above = np.cumsum(mass[::-1])[::-1]
    beyond = np.append(above[1:], 0.0)
    at_points = lfilter([-math.expm1(-h)], [1.0, -math.exp(-h)], beyond[::-1])[::-1]
    k = int(np.argmax(at_points <= delta))
    if at_points[k] > delta or (k == 0 and losses[0] > 0):
        return None
    decay = float((above[k] - at_points[k]) / at_points[k]) if at_points[k] > 0 else 0.0
    back = math.log1p((delta - at_points[k]) / (above[k] - delta)) if above[k] > delta else h
    epsilon = float(losses[k] - min(back, h))
    fade, faster = math.exp(-lam * h), math.exp(-(lam + 1) * h)
    weight = math.exp(min(moment - lam * epsilon, 700.0)) * (fade / (1 - fade) - faster / (1 - faster))
    return _Composed(max(0.0, epsilon), decay, float(density.min()) * weight / delta)
