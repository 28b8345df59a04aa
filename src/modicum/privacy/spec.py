"""What is protected, from whom: the statement without which no ε can be printed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from modicum.errors import UnsoundError, UserError


class Unit(StrEnum):
    """Whose participation is hidden."""

    RECORD = "record"
    CLIENT = "client"


class Adjacency(StrEnum):
    """How two neighbouring datasets differ in one unit."""

    ZERO_OUT = "zero-out"  # its contribution is replaced by zero; sizes stay public
    ADD_REMOVE = "add-remove"  # it is there or not
    REPLACE_ONE = "replace-one"  # it is replaced by another


@dataclass(frozen=True)
class ServerSeesMessages:
    """The adversary sees every message of every client; each sender must add all the noise it relies on."""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "server-sees-messages"}

    def sentence(self) -> str:
        return "the server and everyone else, who see every message"


@dataclass(frozen=True)
class SecureAggregation:
    """The adversary sees only the sum over `participants`, and knows the shares of those that collude (R8).

    Colluding clients and dropouts are counted apart: the noise of either is missing, and both may happen at once.
    """

    participants: int
    colluding: int = 1  # with the server; any participant knows its own share
    dropouts: int = 0  # beyond which a round is abandoned before its sum is seen

    def __post_init__(self) -> None:
        if min(self.colluding, self.dropouts) < 0 or self.honest < 1:
            raise UserError(
                f"secure aggregation needs a client that neither colludes nor drops out, got {self.colluding} and "
                f"{self.dropouts} of {self.participants}: raise the cohort size or lower colluding or dropouts"
            )

    @property
    def honest(self) -> int:
        """How many noise shares that the adversary does not know are certain to be in the sum."""
        return self.participants - self.colluding - self.dropouts

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "secure-aggregation",
            "participants": self.participants,
            "colluding": self.colluding,
            "dropouts": self.dropouts,
        }

    def sentence(self) -> str:
        missing = f", with up to {self.dropouts} others missing" if self.dropouts else ""
        return (
            f"the server and up to {self.colluding} of {self.participants} clients together, who see only the "
            f"sum of each round{missing} (ideal secure aggregation is assumed)"
        )


@dataclass(frozen=True)
class TrustedServer:
    """The server is trusted with messages; the adversary sees only the models it publishes."""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "trusted-server"}

    def sentence(self) -> str:
        return "everyone who sees the published models, but not the server, which is trusted"


View = ServerSeesMessages | SecureAggregation | TrustedServer


def view_from_dict(d: dict[str, Any]) -> View:
    match d:
        case {"kind": "server-sees-messages"}:
            return ServerSeesMessages()
        case {"kind": "secure-aggregation", "participants": int(p), "colluding": int(c), "dropouts": int(gone)}:
            return SecureAggregation(p, c, gone)
        case {"kind": "trusted-server"}:
            return TrustedServer()
    raise UserError(f"unknown view {d!r}: use server-sees-messages, secure-aggregation or trusted-server")


@dataclass(frozen=True, kw_only=True)
class PrivacySpec:
    """The four things that give an ε its meaning. Builds the mechanism and its accounting alike."""

    unit: Unit
    adjacency: Adjacency = Adjacency.ZERO_OUT
    view: View = ServerSeesMessages()
    delta: float = 1e-5

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", Unit(self.unit))
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
        if not (isinstance(self.delta, int | float) and 0 < self.delta < 1):
            raise UserError(f"delta must lie strictly between 0 and 1, got {self.delta}")
        if isinstance(self.view, SecureAggregation):
            if self.unit is not Unit.CLIENT:
                raise UnsoundError(
                    "secure aggregation protects whole clients here (R8): use unit 'client', or the view "
                    "server-sees-messages for records"
                )
            if self.adjacency is not Adjacency.ZERO_OUT:
                raise UnsoundError(
                    f"secure aggregation with {self.adjacency} breaks rule R8 (the victim's own noise share "
                    "must stay in the sum): use zero-out"
                )
        if (self.unit, self.adjacency, self.view) == (
            Unit.CLIENT,
            Adjacency.ADD_REMOVE,
            ServerSeesMessages(),
        ):
            raise UnsoundError(
                "add-remove cannot hide a client from a server that sees who sends a message: use zero-out"
            )
        if isinstance(self.view, TrustedServer) and self.unit is not Unit.CLIENT:
            raise UnsoundError(
                "a trusted server protects whole clients here: use unit 'client', or the view "
                "server-sees-messages for records"
            )

    def refuse_true_sizes(self) -> None:
        """For whoever builds on the true number of records or clients: add-remove needs declared ones (R4)."""
        if self.adjacency is Adjacency.ADD_REMOVE:
            raise UnsoundError(
                f"add-remove would hide how many {self.unit}s there are, and a run tells their true number (R4): "
                "use zero-out or replace-one"
            )

    def sensitivity(self, bound: float, *, sampled: bool) -> float:
        """L2 sensitivity of a sum of contributions of norm at most `bound`.

        Replace-one moves an unsampled sum by 2·bound. Under Poisson sampling the two neighbours are the
        mixtures (1−q)·N(0)+q·N(±bound), so the bound itself enters and the accountant takes that pair (R6).
        """
        if not (math.isfinite(bound) and bound > 0):
            raise UserError(f"a clipping bound must be a positive finite number, got {bound}")
        doubled = self.adjacency is Adjacency.REPLACE_ONE and not sampled
        return 2 * bound if doubled else bound

    def sentence(self) -> str:
        """What is protected from whom, for people."""
        what = {
            Adjacency.ZERO_OUT: f"whether one {self.unit}'s contribution was real or blanked out",
            Adjacency.ADD_REMOVE: f"whether one {self.unit} took part at all",
            Adjacency.REPLACE_ONE: f"which of two values one {self.unit} had",
        }[self.adjacency]
        return f"Hides {what} from {self.view.sentence()}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "unit": str(self.unit),
            "adjacency": str(self.adjacency),
            "view": self.view.to_dict(),
            "delta": self.delta,
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> PrivacySpec:
        return cls(
            unit=Unit(d["unit"]),
            adjacency=Adjacency(d["adjacency"]),
            view=view_from_dict(d["view"]),
            delta=float(d["delta"]),
        )
