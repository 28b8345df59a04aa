"""The same bound for everyone, always."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.errors import UserError


@dataclass(frozen=True)
class Fixed:
    """C_i = bound in every round."""

    bound: float = 1.0

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.bound < float("inf"):
            raise UserError(f"a clipping bound must be positive and finite, got {self.bound}")

    def init(self, public: PublicFacts) -> State:
        return {}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(self.bound))

    def observe(self, state: State, observed: Observation) -> State:
        return state
