"""FedMAP's server as printed: ε of each client from the σ that it sent, the largest broadcast (Eqs. 6–9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision, ReleasedSum
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.papers.fedmap.accounting import FEDMAP_ORDERS, LookUp


@dataclass(frozen=True)
class GlobalAccount:
    """ε_global = max_i ε_i, told to every client of the next round; the bound is each client's own affair.

    Eq. (7) adds up the rounds that a client took part in: of the others no σ is known.
    """

    clip: float  # what proposals hold: faithful clients choose (C, σ) themselves, batch by batch
    share: float  # q = |S_t|/N
    delta: float

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def init(self, public: PublicFacts) -> State:
        return {"rho": {}, "epsilon": 0.0}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(self.clip, told=state["epsilon"]))

    def observe(self, state: State, observed: Observation) -> State:
        if not observed.opened or isinstance(observed.opened, ReleasedSum):
            return state
        table, rho = LookUp(self.share), dict(state["rho"])
        for message in observed.opened:
            before = rho.get(message.client, [0.0] * len(FEDMAP_ORDERS))
            now = table.rho(message.metrics["sigma"])  # Eq. (6)
            rho[message.client] = [b + n for b, n in zip(before, now, strict=True)]  # Eq. (7)
        return {"rho": rho, "epsilon": max(table.epsilon(total, self.delta) for total in rho.values())}  # (8), (9)

    def claimed(self, state: State, public: PublicFacts) -> float:
        """ε_global after the last round."""
        del public
        return float(state["epsilon"])
