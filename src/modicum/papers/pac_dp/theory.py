"""PAC-DP's Theorems 5 and 6 for a fitted curve and a federation: how far the curve may err, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from modicum.errors import UserError
from modicum.papers.pac_dp.curve import Curve
from modicum.papers.pac_dp.quadratic import quadratic_of


@dataclass(frozen=True)
class FittingError:
    """Theorem 5: E|Ĉ − C*|² ≤ σ²_sim/n + η², with what stands for each term.

    The true optimum is not known: σ²_sim is the variance of the bound that single seeds choose, η² the mean square
    that the quadratic leaves of the chosen bounds. Both judge the curve against its own simulation, no more.
    """

    simulation: float | None  # σ²_sim/n; None where a curve does not hold its seeds' choices
    approximation: float  # η²

    @property
    def bound(self) -> float:
        """On |Ĉ − C*|, as a root mean square."""
        return math.sqrt((self.simulation or 0.0) + self.approximation)

    def utility_gap(self, lipschitz: float) -> float:
        """L·|Ĉ − C*|: what is lost by the fitted bound, for a loss that changes by at most L per unit of C."""
        if not 0 <= lipschitz < math.inf:
            raise UserError(f"a Lipschitz constant is finite and at least 0, got {lipschitz:g}")
        return lipschitz * self.bound


def fitting_error(curve: Curve, where: str) -> FittingError:
    """Theorem 5's terms of a fitted curve."""
    quadratic = quadratic_of(curve, where)
    pairs = curve.about["pairs"]
    left = [c - quadratic(budget) for budget, c in pairs]
    chosen = np.asarray(curve.about.get("by_seed") or [[0.0]], float)
    spread = float(chosen.var(0, ddof=1).mean()) / chosen.shape[1] if len(chosen) > 1 else None
    return FittingError(spread, float(np.mean(np.square(left))))


@dataclass(frozen=True)
class Costs:
    """Theorem 6 with constants 1: numbers sent and multiplications, for comparison."""

    sent: float  # numbers that all clients of a round send: q·M·d
    client: float  # of one client in a round: R·d
    offline: float  # of the grid: n·m·T_pre·d


def costs(
    *, clients: int, share: float, dimension: int, steps: int, budgets: int = 0, bounds: int = 0, rounds: int = 0
) -> Costs:
    """Theorem 6; the last three are those of the grid that a curve was fitted on."""
    if min(clients, dimension, steps) < 1 or not 0 < share <= 1 or min(budgets, bounds, rounds) < 0:
        raise UserError("costs need clients, a dimension and steps of at least 1 and a share of clients in (0, 1]")
    return Costs(share * clients * dimension, steps * dimension, budgets * bounds * rounds * dimension)
