"""Kinds of noise as a policy sees them: which a client still has, and which is nearest to the one asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from modicum.core.facts import PublicFacts
from modicum.core.parts import Observation

WHOLE = 1 - 1e-9  # of a participation: shares are rounded

Left = dict[str, list[float]]
"""Participations that each client has left of each kind."""


def at_first(public: PublicFacts) -> Left:
    """Everything that the plans hold, before the first round."""
    return {name: [float(n) for n in counts] for name, counts in public.stock.items()}


def after(observed: Observation, first: Mapping[str, Sequence[float]]) -> Left:
    """From what plans have left of each kind, or filters of their caps."""
    left = {}
    for name, counts in first.items():
        shares = observed.stock.get(name) or [observed.left.get(name, 1.0)] * len(counts)
        left[name] = [share * n for share, n in zip(shares, counts, strict=False)]
    return left


def nearest(asked: int, scales: Sequence[float], left: Sequence[float]) -> int | None:
    """The kind nearest to `asked` of which a whole participation is left, ties to more noise; None: none is."""
    able = [kind for kind, n in enumerate(left) if n >= WHOLE]
    if not able:
        return None
    return min(able, key=lambda kind: (round(abs(math.log(scales[kind] / scales[asked])), 9), -scales[kind]))
