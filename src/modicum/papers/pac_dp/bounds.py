"""PAC-DP's Table I evaluated for a configuration, with the terms that it leaves out.

The paper's rates hide the dimension in O(·) and drop the bias of clipping. Here every rate comes as a sum of named
terms with constants 1, so that one sees which of them rules: they compare configurations, and are no error bars.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from modicum.errors import UserError


class Objective(StrEnum):
    """What is assumed of the loss."""

    NON_CONVEX = "non-convex"
    CONVEX = "convex"
    STRONGLY_CONVEX = "strongly convex"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A configuration: M clients a round, T rounds, batch B, noise multiplier z, bound C, dimension d."""

    clients: int
    rounds: int
    batch: float
    multiplier: float
    bound: float
    dimension: int
    bias: float = 0.0  # b(C) = ‖E[g − clip(g, C)]‖, e.g. from public gradients (`Surrogate.bias`)
    curvature: float = 1.0  # μ, for strongly convex objectives

    def __post_init__(self) -> None:
        numbers = (self.clients, self.rounds, self.batch, self.bound, self.dimension, self.curvature)
        if not all(0 < v < math.inf for v in numbers) or not (self.multiplier >= 0 and self.bias >= 0):
            raise UserError("a convergence bound needs positive sizes, and noise and bias of at least 0")


@dataclass(frozen=True)
class Bound:
    """`printed` is Table I's rate; `complete` adds √d to the noise and the bias of clipping."""

    optimisation: float
    noise_printed: float  # zC/(B√M)
    noise: float  # √d·zC/(B√M): the norm of the noise, not one coordinate of it
    bias: float

    @property
    def printed(self) -> float:
        """The rate as Table I has it."""
        return self.optimisation + self.noise_printed

    @property
    def complete(self) -> float:
        """The rate with the noise's whole norm and the bias of clipping."""
        return self.optimisation + self.noise + self.bias


def bound(objective: Objective | str, terms: Configuration) -> Bound:
    """Table I: 1/√(MT), 1/√T or 1/(μT), plus zC/(B√M) (over μ where strongly convex)."""
    objective = Objective(objective)
    over = terms.curvature if objective is Objective.STRONGLY_CONVEX else 1.0
    optimisation = {
        Objective.NON_CONVEX: 1 / math.sqrt(terms.clients * terms.rounds),
        Objective.CONVEX: 1 / math.sqrt(terms.rounds),
        Objective.STRONGLY_CONVEX: 1 / (terms.curvature * terms.rounds),
    }[objective]
    printed = terms.multiplier * terms.bound / (terms.batch * math.sqrt(terms.clients)) / over
    return Bound(optimisation, printed, math.sqrt(terms.dimension) * printed, terms.bias / over)
