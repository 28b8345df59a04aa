"""A bound that stands still, then falls: the plateau-then-cosine schedule of PAC-DP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.parts import Observation, Place, Policy, Scope, Signal, State
from modicum.errors import UserError
from modicum.policies.fixed import Fixed


@dataclass(frozen=True)
class PlateauCosine:
    """C_i(t) = C_i · λ(t), with the bounds C_i of any policy that chooses them before the run.

    λ = 1 for t < T_s = ⌊r_s·T⌋, then a half cosine from 1 towards λ_min at t = T (PAC-DP, Eq. 9). The schedule is
    public, and the noise falls with the bound: no release, no cost (R1). The base sees no releases, so that it
    cannot take the falling bound for a change in the data; one that buys signals is refused.
    """

    base: Policy = field(default_factory=Fixed)
    plateau: float = 0.6  # r_s
    floor: float = 0.1  # λ_min

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.plateau <= 1:
            raise UserError(f"the plateau is a share of the rounds, between 0 and 1, got {self.plateau}")
        if not 0 < self.floor <= 1:
            raise UserError(f"the schedule's last factor must lie in (0, 1], got {self.floor}")
        if self.base.signals or self.base.scope is not Scope.ROUND or self.base.place is not Place.SERVER:
            raise UserError("a schedule needs bounds that stand before the run: use fixed bounds as its base")

    def factor(self, round: int, rounds: int) -> float:
        """λ(t)."""
        start = math.floor(self.plateau * rounds)
        if round < start:
            return 1.0
        progress = (round - start) / (rounds - start)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2  # Eq. (9)

    def init(self, public: PublicFacts) -> State:
        return {"rounds": public.rounds, "base": self.base.init(public)}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        factor = self.factor(round, state["rounds"])
        chosen = self.base.decide(state["base"], round, clients)
        return {name: replace(d, bound=d.bound * factor) for name, d in chosen.items()}

    def observe(self, state: State, observed: Observation) -> State:
        return state
