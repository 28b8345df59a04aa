"""What an event or a plan records of integer noise: the agreed terms, and the bound that one unit keeps to.

Plain numbers, free of any opinion on what they cost. A release with such noise also records the multiplier of the
Gaussian that it is worth; `integer_terms.claim_problem` says whether the two fit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from modicum.errors import UserError


class Rounding(StrEnum):
    """What is rounded to the lattice, and so how far rounding lets one unit move a sum."""

    EACH = "each"  # every unit's own vector, conditionally on its squared norm
    SUM = "sum"  # a client's sum over its units, as a whole: the worst case is charged


@dataclass(frozen=True, kw_only=True)
class IntegerNoise:
    """Skellam noise in lattice steps. `honest` clients' noise counts, each with variance `share`."""

    dimension: int  # coordinates that are noised and sent
    steps: int  # lattice steps to the unit of the normalised vector
    rounding: Rounding
    share: float
    honest: int
    clients: int
    units: int  # vectors of norm 1 in one sum, at most
    bits: int  # of the modulus
    square: int  # S: one unit moves the sum by an integer vector of at most this squared norm

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", Rounding(self.rounding))
        whole = (self.dimension, self.steps, self.honest, self.clients, self.units, self.bits, self.square)
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in whole) or not self.share > 0:
            raise UserError("integer noise is described by positive whole numbers and a positive variance")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"rounding": str(self.rounding)}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> IntegerNoise:
        """Back from `to_dict`."""
        given = {f.name: int(d[f.name]) for f in fields(cls) if f.name not in ("rounding", "share")}
        return cls(**given, rounding=Rounding(d["rounding"]), share=float(d["share"]))
