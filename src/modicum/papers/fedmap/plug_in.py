"""The best bound by formula: a log-normal fit to two paid signals, and the bound that makes most progress with it.

The null model that a learned policy has to beat: same releases, no network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision, ReleasedSum
from modicum.core.parts import Observation, Place, Scope, Signal, SignalName, State
from modicum.errors import UserError
from modicum.policies.releases import mean_update

REACH = 100.0
MEMORY = 0.7  # of the signals' running means


@dataclass(frozen=True)
class PlugIn:
    """C = argmax U, where norms are log-normal and alignment does not depend on them.

    Then the clipped mean is κ(C) = E min(n, C) times a direction, whose length the noised update shows. The bound
    moves by at most a factor of 2 a round.
    """

    initial: float = 1.0
    ratio: float = 10.0

    scope = Scope.ROUND
    place = Place.SERVER

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise UserError(f"the first clipping bound must be positive and finite, got {self.initial}")

    @property
    def signals(self) -> tuple[Signal, ...]:
        return Signal(SignalName.CLIP_BIT, self.ratio), Signal(SignalName.SQUARE_NORM, self.ratio)

    def init(self, public: PublicFacts) -> State:
        return {"bound": self.initial, "fit": None, "size": None}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"]))

    def observe(self, state: State, observed: Observation) -> State:
        share, square = (observed.signal(name) for name in (SignalName.CLIP_BIT, SignalName.SQUARE_NORM))
        if not observed.opened or share is None or square is None:
            return state
        bound = max(d.bound for d in observed.decisions.values())
        fit = log_normal(min(max(share[0], 0.02), 0.98), min(max(square[0], 0.02), 0.98))
        centre, spread = fit[0] + math.log(bound), fit[1]
        if state["fit"] is not None:
            centre, spread = (
                MEMORY * a + (1 - MEMORY) * b for a, b in zip(state["fit"], (centre, spread), strict=True)
            )
        size, noise = _figures(observed, bound)
        kappa = float(moment(bound, centre, spread, 1))
        grid = np.exp(np.linspace(math.log(bound / 2), math.log(bound * 2), 41))
        grid = grid[(grid >= self.initial / REACH) & (grid <= self.initial * REACH)]
        signal = (size * bound / kappa * moment(grid, centre, spread, 1)) ** 2
        best = float(grid[np.argmax(signal / (signal + noise * grid**2 + 1e-300))]) if len(grid) else bound
        return {"bound": best, "fit": [centre, spread], "size": size}


def _figures(observed: Observation, bound: float) -> tuple[float, float]:
    """Length of the clipped mean over C, and the noise's square over C², from the mean update."""
    assert observed.opened
    mean, variance = mean_update(observed.opened)
    opened = observed.opened
    gain = (
        opened.facts.gain if isinstance(opened, ReleasedSum) else sum(r.facts.gain for r in opened) / len(opened)
    )
    square, noise = float(mean.double().square().sum()), mean.numel() * variance
    unit = (bound * gain) ** 2
    if not math.isfinite(square):
        return 0.0, noise / unit
    return math.sqrt(min(max(square - noise, 0.0) / unit, 1.0)), noise / unit


def moment(bound: np.ndarray | float, centre: float, spread: float, power: int) -> np.ndarray:
    """E min(n, C)^p for ln n ~ N(centre, spread²)."""
    at = (np.log(bound) - centre) / spread
    below = np.exp(power * centre + (power * spread) ** 2 / 2) * ndtr(at - power * spread)
    return np.asarray(below + np.asarray(bound) ** power * ndtr(-at))


def log_normal(share: float, square: float) -> tuple[float, float]:
    """(centre, spread) of ln(n/C) with P(n ≤ C) = share and E min(n, C)²/C² nearest to `square`."""
    from scipy.special import ndtri

    spreads = np.exp(np.linspace(math.log(0.05), math.log(4.0), 60))
    centres = -spreads * float(ndtri(share))
    found = [float(moment(1.0, c, s, 2)) for c, s in zip(centres, spreads, strict=True)]
    best = int(np.argmin(np.abs(np.array(found) - square)))
    return float(centres[best]), float(spreads[best])
