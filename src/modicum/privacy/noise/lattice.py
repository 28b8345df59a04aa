"""From a clipped vector to integers and back: rotation, rounding, and the terms of integer noise (R12, R13).

A unit's vector is divided by its clipping bound, so that its norm is at most 1, multiplied by a number of lattice
steps, rotated by public random signs and Walsh–Hadamard transforms, and rounded at random to integers whose
squared norm is at most `square`. That bound is checked on the integers themselves: sensitivity holds exactly,
whatever floats did before. The rotation spreads a vector over all coordinates; it is public and protects nobody.

A sum over many units may also be rounded as a whole. For fixed random words rounding is monotone and commutes
with whole numbers, so a unit that moves a coordinate by g moves its rounding to one of g's two neighbours, to the
upper one for a share of words that makes g the mean: whatever the sum of the others is, the shift is a random
rounding of g, coordinate by coordinate. It is within ‖g‖ + √d always, and within the bound below but for a
probability of `FAILURE_PROBABILITY` over the words, which is charged to δ. Words are independent of the data:
telling them only helps a test.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modicum.errors import UserError
from modicum.privacy.accounting.sampler_charge import FAILURE_PROBABILITY
from modicum.privacy.checks import positive
from modicum.privacy.integer_noise import Rounding
from modicum.privacy.noise.skellam import Bits

KAPPA = 1.0  # √(2·ln 1/β) with β = e^−½: a rounding is accepted with probability 1 − β or more
_TRIES = 200  # β^200 < 10^−43; then towards zero, which always fits
_LARGEST = 2.0**62
_KAPPA_OF_SUM = math.sqrt(-2 * math.log(FAILURE_PROBABILITY))
SLACK = 1.1e-3  # relative: what floats may add to a unit's share of a sum, R10's 1e-3 and the rotation's rounding
_WIDEST = 64  # Hadamard matrices are multiplied in factors of at most this size

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Lattice:
    """`dimension` coordinates; `steps` lattice steps to the unit of the normalised vector."""

    dimension: int
    steps: int
    rounding: Rounding = Rounding.EACH

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.steps < 1:
            raise UserError(f"a lattice needs coordinates and steps, got {self.dimension} and {self.steps}")

    def square(self, norm: float) -> int:
        """S: the squared norm that rounding keeps to, for a vector of this norm (both in lattice steps).

        min{(n + √d)², n² + d/4 + κ(n + √d/2)} (Kairouz, Liu & Steinke 2021): the second by conditional rounding.
        κ = √(2·ln 1/β), β the probability of what is drawn again. Of a sum that is rounded as a whole, what a unit
        of this norm moves it by: nothing is drawn again, so β is tiny; and the slack.
        """
        d, root, kappa = self.dimension, math.sqrt(self.dimension), self._kappa
        norm *= self._longer
        return math.floor(min((norm + root) ** 2, norm**2 + d / 4 + kappa * (norm + root / 2)))

    @property
    def _kappa(self) -> float:
        return _KAPPA_OF_SUM if self.rounding is Rounding.SUM else KAPPA

    @property
    def _longer(self) -> float:
        return 1 + SLACK if self.rounding is Rounding.SUM else 1.0

    def norm(self, square: float) -> float:
        """The largest norm whose rounding keeps to `square`; 0 if there is none."""
        root, kappa = math.sqrt(self.dimension), self._kappa
        room = square - self.dimension / 4 - kappa * root / 2 + kappa**2 / 4
        return max(0.0, math.sqrt(square) - root, math.sqrt(max(0.0, room)) - kappa / 2) / self._longer

    def scale(self, square: int) -> float:
        """Lattice steps to the unit for somebody who keeps to `square`."""
        return min(float(self.steps), self.norm(square))


def quantise(vectors: Floats, lattice: Lattice, square: int, seed: bytes, bits: Bits = os.urandom) -> Integers:
    """Rows of norm at most 1 as integers of squared norm at most `square` (longer rows are shortened first).

    Rows whose budget allows less than the lattice's full scale come out shorter: `lattice.norm(square)` steps.
    Sums that are rounded as a whole are as long as they are: `square` bounds what one unit moves them by.
    """
    rows = np.atleast_2d(np.asarray(vectors, dtype=np.float64))
    if rows.shape[1] != lattice.dimension or not np.isfinite(rows).all():
        raise UserError(f"a lattice of {lattice.dimension} finite coordinates cannot hold what it was given")
    scale = lattice.scale(square)
    if lattice.rounding is Rounding.SUM:
        turned = rotate(rows * scale, seed)
        return round_rows(turned, None, bits).reshape(np.shape(vectors))
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    turned = rotate(rows * (scale / np.maximum(1.0, lengths))[:, None], seed)
    return round_rows(turned, square, bits).reshape(np.shape(vectors))


def dequantise(total: Integers, lattice: Lattice, seed: bytes) -> NDArray[np.float64]:
    """A sum of rounded rows, in units of the clipping bound."""
    spread = _mixed(np.array(total, dtype=np.float64)[None], backwards=True)[0]
    return np.asarray(_signs(seed, lattice.dimension) * spread / lattice.steps)


def round_rows(rows: NDArray[np.float64], square: int | None, bits: Bits = os.urandom) -> Integers:
    """Each coordinate up or down at random, its mean kept; a row is drawn again until it keeps to `square`.

    How often depends on the data, and so does the time that it takes.
    """
    if not (np.abs(rows) < _LARGEST).all():  # nor NaN: what an integer cannot hold would be cast to anything
        raise UserError("rows to be rounded must be finite and below 2^62")
    if square is None:
        return _round(rows, bits)
    out = np.zeros(rows.shape, dtype=np.int64)
    left = np.arange(len(rows))
    for _ in range(_TRIES):
        out[left] = _round(rows[left], bits)
        left = left[squared_norms(out[left]) > square]
        if not len(left):
            return out
    out[left] = np.trunc(rows[left]).astype(np.int64)
    out[left[squared_norms(out[left]) > square]] = 0
    return out


def squared_norms(rows: Integers) -> NDArray[np.object_]:
    """Exact, in Python's integers: halves of 31 bits are squared apart, so nothing overflows."""
    if np.any((rows >= 1 << 31) | (rows <= -(1 << 31))):  # not by np.abs, which leaves −2^63 negative
        return np.array([sum(int(x) ** 2 for x in row) for row in rows], dtype=object)
    high, low = rows >> 16, rows & 0xFFFF
    dot = [np.einsum("ij,ij->i", a, b).astype(object) for a, b in ((high, high), (high, low), (low, low))]
    return np.asarray((dot[0] << 32) + (dot[1] << 17) + dot[2])


def _round(rows: NDArray[np.float64], bits: Bits) -> Integers:
    floor = np.floor(rows)
    words = np.frombuffer(bits(4 * rows.size), dtype="<u4").reshape(rows.shape)
    up = words < (rows - floor) * 2.0**32
    return floor.astype(np.int64) + up


def rotate(rows: NDArray[np.float64], seed: bytes) -> NDArray[np.float64]:
    """Flip signs by the public seed and transform; norms stay."""
    return _mixed(rows * _signs(seed, rows.shape[1]))


def _mixed(rows: NDArray[np.float64], *, backwards: bool = False) -> NDArray[np.float64]:
    """Hadamard's transform of the first m coordinates and then of the last m, where `rows` stands.

    m is the largest power of two that fits, so the two overlap or are one: any number of coordinates is rotated
    without padding. Each is orthonormal and its own inverse; backwards they come in the other order.
    """
    size = rows.shape[1]
    m = 1 << (size.bit_length() - 1)
    parts = [slice(0, m), slice(size - m, size)] if m < size else [slice(0, m)]
    for part in reversed(parts) if backwards else parts:
        rows[:, part] = hadamard(rows[:, part])
    return rows


def _signs(seed: bytes, size: int) -> NDArray[np.float64]:
    text = hashlib.shake_256(b"modicum lattice rotation" + seed).digest((size + 7) // 8)
    flips = np.unpackbits(np.frombuffer(text, dtype=np.uint8), count=size)
    return 1.0 - 2.0 * flips.astype(np.float64)


def hadamard(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The orthonormal Walsh–Hadamard transform of each row, its own inverse.

    H_n is a Kronecker product of small ones: multiply along the first axis and move that axis to the end, until
    every axis has been first.
    """
    count, left = rows.shape
    while left > 1:
        k = min(_WIDEST, left)
        rows = (_matrix(k) @ rows.reshape(count, k, -1)).transpose(0, 2, 1).reshape(count, -1)
        left //= k
    return rows


def _matrix(size: int) -> NDArray[np.float64]:
    matrix: NDArray[np.float64] = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return matrix


def finest_needed(
    dimension: int, smallest_scale: float, loss: float, rounding: Rounding = Rounding.EACH
) -> Lattice:
    """The coarsest power of two of steps at which rounding costs the *smallest* scaled vector at most `loss`.

    `loss` is the share of noise variance that rounding costs: square / norm² − 1.
    """
    scale, allowed = positive("the smallest scale", smallest_scale), positive("the loss", loss)
    for power in range(1, 31):
        lattice = Lattice(dimension, 1 << power, rounding)
        square = lattice.square(scale * lattice.steps)
        norm = lattice.norm(square)  # what is left: squares are whole, and a small one may leave nothing
        if 0 < square <= (1 + allowed) * norm**2:
            return lattice
    raise UserError(f"no lattice rounds vectors of scale {scale:g} at a loss of {allowed:g}: allow a larger loss")
