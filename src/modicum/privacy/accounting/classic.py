"""The classic formulas, for what papers claim: one Gaussian release, and Rényi bounds turned into ε."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from modicum.privacy.checks import positive, probability


def classic_noise(epsilon: float, delta: float) -> float:
    """z = √(2 ln(1.25/δ))/ε: one release only, and proved only for ε < 1 (Dwork & Roth 2014, Thm. A.1)."""
    return math.sqrt(2 * math.log(1.25 / probability("delta", delta))) / positive("epsilon", epsilon)


def classic_epsilon(noise_multiplier: float, delta: float) -> float:
    """The same formula the other way round."""
    return classic_noise(noise_multiplier, delta)


def classic_conversion(rho: Callable[[float], float], orders: Sequence[float], delta: float) -> float:
    """The smallest ρ(α) + ln(1/δ)/(α − 1) over the orders: Mironov (2017), Prop. 3."""
    return min(rho(a) + math.log(1 / delta) / (a - 1) for a in orders)
