"""What an answer can be: bounds that an honest client breaks with probability at most `DOUBT` (docs/hostile.md).

An update is a clipped part plus Gaussian noise, so its norm is at most the clipped part's plus a quantile of the
noise's, √χ²_d. The doubt of one answer is divided among everything that is checked in it (a union bound).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from scipy.stats import binom, chi2, norm
from torch import Tensor

from modicum.core.messages import Expected, Message, Noised, Range
from modicum.privacy.events import Cyclic, NoSampling, Poisson, Sampler

DOUBT = 1e-9  # of one honest answer
ROUNDING = 1e-3  # relative: what clipping in single precision is allowed to exceed its bound by (R10)


@lru_cache(maxsize=4096)
def noise_norm(dimension: int, doubt: float) -> float:
    """√q with P(χ²_d > q) = doubt: the norm of standard normal noise in d dimensions stays below it."""
    return math.sqrt(float(chi2.isf(doubt, dimension)))


@lru_cache(maxsize=256)
def spread(doubt: float) -> float:
    """Standard deviations that one normal number leaves, to either side, with probability `doubt`."""
    return float(norm.isf(doubt / 2))


@lru_cache(maxsize=4096)
def most_drawn(records: int, sampler: Sampler, doubt: float) -> int:
    """Records that enter a step: all of them, or as many as Poisson sampling draws but with this doubt."""
    if isinstance(sampler, Cyclic):
        return -(-records // sampler.batches)
    if isinstance(sampler, NoSampling):
        return records
    assert isinstance(sampler, Poisson)
    return int(min(records, binom.isf(doubt, records, sampler.rate)))


def around(middle: float, reach: float) -> Range:
    """The range of this reach about its middle, widened by what rounding may add."""
    reach *= 1 + ROUNDING
    return middle - reach, middle + reach


def rounded_away(model: Tensor, steps: int, update: float) -> float:
    """How much longer an update of this norm can get because each step is rounded to the precision of the weights:
    steps that are much smaller than those are lost or doubled.
    """
    size = float(torch.linalg.vector_norm(model, dtype=torch.float64)) + update
    return steps * float(torch.finfo(model.dtype).eps) / 2 * size


def objection(message: Message, expected: Expected) -> str | None:
    """Why no honest client can have sent this, in words of our own: nothing of the sender's is repeated."""
    length = torch.linalg.vector_norm(message.update, dtype=torch.float64).item()
    if not math.isfinite(length):
        return "its update is not finite"
    if length > expected.norm:
        return f"its update has norm {length:.4g}, and clipping and noise reach {expected.norm:.4g}"
    metrics = message.metrics if isinstance(message, Noised) else {}
    return _outside("signal", message.signals, expected.signals) or _outside("metric", metrics, expected.metrics)


def _outside(what: str, sent: Mapping[str, float], expected: Mapping[str, Range]) -> str | None:
    if set(sent) != set(expected):
        return f"its {what}s are not those that were asked for"
    for name, (low, high) in expected.items():
        if not low <= sent[name] <= high:
            return f"its {what} {name} is {sent[name]:.4g}, outside [{low:.4g}, {high:.4g}]"
    return None
