"""What is protected, from whom: the statement without which no ε can be printed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from modicum.errors import UnsoundError, UserError
from modicum.privacy.views import (
    Adjacency,
    ModelsSeen,
    RepliesSeen,
    SecureAggregation,
    ServerSeesMessages,
    TrustedServer,
    Unit,
    View,
    view_from_dict,
)

__all__ = [
    "LARGEST_BUDGET",
    "SMALLEST_BUDGET",
    "Adjacency",
    "ModelsSeen",
    "PrivacySpec",
    "RepliesSeen",
    "SecureAggregation",
    "ServerSeesMessages",
    "TrustedServer",
    "Unit",
    "View",
    "view_from_dict",
]

SMALLEST_BUDGET, LARGEST_BUDGET = 1e-9, 1e9
"""Budgets ε whose noise can be computed; ∞ stands for no privacy."""


@dataclass(frozen=True, kw_only=True)
class PrivacySpec:
    """The four things that give an ε its meaning. Builds the mechanism and its accounting alike."""

    unit: Unit
    adjacency: Adjacency = Adjacency.ZERO_OUT
    view: View = field(default_factory=ServerSeesMessages)
    delta: float = 1e-5

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", Unit(self.unit))
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        if not (isinstance(self.delta, int | float) and 0 < self.delta < 1):
            raise UserError(f"delta must lie strictly between 0 and 1, got {self.delta}")
        self.view.refuse(self.unit, self.adjacency)

    def refuse_true_sizes(self) -> None:
        """For whoever builds on the true number of records or clients: add-remove needs declared ones (R4)."""
        if self.adjacency is Adjacency.ADD_REMOVE:
            raise UnsoundError(
                f"add-remove would hide how many {self.unit}s there are, and a run tells their true number (R4): "
                "use zero-out or replace-one"
            )

    def seen(self, multiplier: float) -> float:
        """Noise over bound in what the adversary sees, where one message has this multiplier (R8)."""
        return multiplier * math.sqrt(self.view.noise_shares)

    def own(self, seen: float) -> float:
        """The inverse of `seen`: the multiplier of one message that gives the adversary this one."""
        return seen / math.sqrt(self.view.noise_shares)

    def charged(self, multiplier: float) -> float:
        """Noise over how far one unit can move what is seen, as a filter charges a message (R2).

        Replace-one moves an unsampled sum by twice its bound. Under sampling this is the looser bound of R6; plain
        composition takes the mixture pair instead.
        """
        return self.seen(multiplier) / self.adjacency.moves

    def sentence(self) -> str:
        """What is protected from whom, for people."""
        what = {
            Adjacency.ZERO_OUT: f"whether one {self.unit}'s contribution was real or blanked out",
            Adjacency.ADD_REMOVE: f"whether one {self.unit} took part at all",
            Adjacency.REPLACE_ONE: f"which of two values one {self.unit} had",
        }[self.adjacency]
        return f"Hides {what} from {self.view.sentence()}."

    def to_dict(self) -> dict[str, Any]:
        """Plain values for journal and certificate."""
        return {
            "unit": str(self.unit),
            "adjacency": str(self.adjacency),
            "view": self.view.to_dict(),
            "delta": self.delta,
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> PrivacySpec:
        """Back from `to_dict`."""
        return cls(
            unit=Unit(d["unit"]),
            adjacency=Adjacency(d["adjacency"]),
            view=view_from_dict(d["view"]),
            delta=float(d["delta"]),
        )
