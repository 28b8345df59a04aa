"""The plausibility check: an honest client's answer fails it with probability at most `FAILURE` (docs/hostile.md).

An update is a clipped part plus Gaussian noise, so its norm is at most the clipped part's plus a quantile of the
noise's, √χ²_d. The failure probability of one answer is divided among everything that is checked in it (a union
bound).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from scipy.stats import binom, chi2
from scipy.stats import norm as normal
from torch import Tensor

from modicum.core.messages import ClippedUpdate, Expected, Message, Noised, NoisedNumber, Sampled

FAILURE = 1e-9  # of one honest answer
ROUNDING = 1e-3  # relative: what clipping in single precision is allowed to exceed its bound by (R10)
Range = tuple[float, float]


@lru_cache(maxsize=4096)
def noise_norm(dimension: int, failure: float) -> float:
    """√q with P(χ²_d > q) = failure: the norm of standard normal noise in d dimensions stays below it."""
    return math.sqrt(float(chi2.isf(failure, dimension)))


@lru_cache(maxsize=256)
def spread(failure: float) -> float:
    """Standard deviations that one normal number leaves, to either side, with this probability."""
    return float(normal.isf(failure / 2))


@lru_cache(maxsize=4096)
def most_drawn(sampled: Sampled, failure: float) -> int:
    """Records that enter a step: all of them, or as many as Poisson sampling exceeds with this probability."""
    if sampled.rate is None:
        return sampled.records
    return int(min(sampled.records, binom.isf(failure, sampled.records, sampled.rate)))


def rounded_away(model: Tensor, steps: int, update: float) -> float:
    """How much longer an update of this norm can get because each step is rounded to the precision of the weights:
    steps that are much smaller than those are lost or doubled.
    """
    size = float(torch.linalg.vector_norm(model, dtype=torch.float64)) + update
    return steps * float(torch.finfo(model.dtype).eps) / 2 * size


@dataclass(frozen=True)
class Limits:
    """How far an honest answer reaches."""

    norm: float
    signals: Mapping[str, Range]
    metrics: Mapping[str, Range]


def limits(expected: Expected, model: Tensor) -> Limits:
    """The largest norm of the update, and the range of each number."""
    update, numbers = expected.update, (expected.signals, expected.metrics)
    draws = any(part.sampled is not None for part in (update, *expected.signals.values()) if part is not None)
    # The update's noise, the sizes of all batches, and each number.
    failure = FAILURE / (1 + draws + sum(map(len, numbers)))
    norm = math.inf if update is None else _norm(update, model, failure)
    return Limits(norm, *({name: _range(n, failure) for name, n in named.items()} for named in numbers))


def _norm(update: ClippedUpdate, model: Tensor, failure: float) -> float:
    dimension = model.numel()
    clipped = update.clipped * _share(update.sampled, failure)
    noise = update.noise_std * noise_norm(dimension, failure)
    if update.optimiser is None:
        return (clipped + noise) * (1 + ROUNDING)
    length = update.optimiser.farthest(update.steps, clipped, noise, dimension)
    return length * (1 + ROUNDING) + rounded_away(model, update.steps, length)


def _range(number: NoisedNumber, failure: float) -> Range:
    reach = number.reach * _share(number.sampled, failure) + spread(failure) * number.noise_std
    reach *= 1 + ROUNDING
    return number.middle - reach, number.middle + reach


def _share(sampled: Sampled | None, failure: float) -> float:
    """The largest of all batches, as a multiple of the expected one."""
    return 1.0 if sampled is None else most_drawn(sampled, failure / sampled.batches) / sampled.over


def objection(message: Message, expected: Expected, model: Tensor) -> str | None:
    """Why no honest client can have sent this, in words of our own: nothing of the sender's is repeated."""
    length = torch.linalg.vector_norm(message.update, dtype=torch.float64).item()
    if not math.isfinite(length):
        return "its update is not finite"
    within = limits(expected, model)
    if length > within.norm:
        return f"its update has norm {length:.4g}, and clipping and noise reach {within.norm:.4g}"
    metrics = message.metrics if isinstance(message, Noised) else {}
    return _outside("signal", message.signals, within.signals) or _outside("metric", metrics, within.metrics)


def _outside(what: str, sent: Mapping[str, float], expected: Mapping[str, Range]) -> str | None:
    if set(sent) != set(expected):
        return f"its {what}s are not those that were asked for"
    for name, (low, high) in expected.items():
        if not low <= sent[name] <= high:
            return f"its {what} {name} is {sent[name]:.4g}, outside [{low:.4g}, {high:.4g}]"
    return None
