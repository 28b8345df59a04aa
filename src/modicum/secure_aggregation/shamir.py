"""Shamir's secret sharing of 32 bytes over the prime field of 2^256 + 297.

By hand, for two reasons. pycryptodome's Shamir shares 16 bytes in GF(2^128), so that a key needs two secrets whose
shares can be mixed up; and it multiplies bit by bit in Python, which makes the server's reconstruction for fifty
clients a matter of minutes. Over a prime field Python's own integers do the work and this page is all of it. The
prime is the smallest one over 2^256, so every string of 32 bytes is an element.

Arithmetic on Python's integers does not run in constant time: somebody who measures a client's own processor is
outside the model, as everywhere in this package.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence

from modicum.errors import UserError

PRIME = 2**256 + 297
SECRET = 32
SHARE = 33


def split(secret: bytes, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """A share for each holder, of which any `threshold` give the secret and fewer say nothing about it.

    Holder i's share is the polynomial's value at i + 1.
    """
    if len(secret) != SECRET or not 0 < threshold <= len(set(holders)) or min(holders) < 0:
        raise UserError("Shamir: a secret has 32 bytes, and at least as many holders as its threshold")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "little"))
    return {holder: _at(coefficients, holder + 1).to_bytes(SHARE, "little") for holder in holders}


def _at(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in coefficients:
        value = (value * x + coefficient) % PRIME
    return value


def weights(holders: Sequence[int]) -> dict[int, int]:
    """Lagrange's coefficients at zero; they depend on the holders only and serve all their secrets."""
    points = [holder + 1 for holder in holders]
    if len(set(points)) != len(points):
        raise UserError("Shamir: a holder appears twice")
    result, product = {}, math.prod(points)
    for holder, x in zip(holders, points, strict=True):
        denominator = x * math.prod(other - x for other in points if other != x)  # whole numbers, of a few bytes
        result[holder] = product * pow(denominator, -1, PRIME) % PRIME
    return result


def combine(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """The secret, or None where the shares belong to no secret of 32 bytes. Wrong shares may give a wrong one."""
    value = sum(int.from_bytes(shares[holder], "little") * w for holder, w in weights.items()) % PRIME
    return value.to_bytes(SECRET, "little") if value < 1 << (8 * SECRET) else None


def is_share(share: bytes) -> bool:
    """Each element has one encoding."""
    return len(share) == SHARE and int.from_bytes(share, "little") < PRIME
