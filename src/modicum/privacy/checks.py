"""Checks of the plain numbers that accountants take; each refusal is one line that says what to change."""

from __future__ import annotations

import math
from numbers import Integral, Real

from modicum.errors import UserError


def positive(name: str, value: float) -> float:
    """The value as a float, if it is positive and finite; else a line that names it."""
    if not (isinstance(value, Real) and math.isfinite(value) and value > 0):
        raise UserError(f"{name} must be a positive finite number, got {value!r}")
    return float(value)


def whole(name: str, value: int, least: int = 1) -> int:
    """The value as an int, if it is a whole number of at least so many; else a line that names it."""
    if not (isinstance(value, Integral) and value >= least):
        raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def probability(name: str, value: float) -> float:
    """The value as a float, if it lies strictly between 0 and 1; else a line that names it."""
    if not (isinstance(value, Real) and 0 < value < 1):
        raise UserError(f"{name} must lie strictly between 0 and 1, got {value!r}")
    return float(value)


def rate(value: float) -> float:
    """A sampling rate in (0, 1]."""
    if not 0 < value <= 1:
        raise UserError(f"the sampling rate must lie in (0, 1], got {value}")
    return float(value)


def steps(value: float) -> int:
    """A number of steps: whole and at least 1."""
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise UserError(f"the number of steps must be a whole number of at least 1, got {value}")
    return int(value)
