"""What a run tells of a round that is over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from modicum.core.extension_points import secret_rate
from modicum.core.facts import ClientFacts
from modicum.core.round_state import RoundState
from modicum.federation.records import RoundRecord
from modicum.federation.server import Server
from modicum.mechanisms.common import told_metrics


def record_of(
    server: Server,
    state: RoundState,
    *,
    moved: bool,
    reserved: float,
    left: Mapping[str, float],
    public: Mapping[str, float],
    simulated: Mapping[str, float],
) -> RoundRecord:
    """Public figures of the round, and simulated ones where there are some. Of a secret cohort nobody is told who
    was drawn, nor how many (R5)."""
    secret = secret_rate(server.method.mechanism) is not None
    names = state.decisions if secret else state.asked
    unit, clients = server.method.mechanism.spec.unit, server.public.clients
    released, noise = told_metrics(state.opened, server.kit.metrics, unit, clients)
    return RoundRecord(
        round=state.round,
        bounds={name: state.decisions[name].bound for name in names},
        answered=None if secret else state.answered,
        refused=state.refused,
        abandoned=not moved,
        reserved=reserved,
        public=public,
        released=released,
        noise=noise,
        simulated=simulated,
        impossible={} if secret else state.impossible,
        void=state.void,
        traffic=state.traffic,
        reserved_by_budget=reserved_by_budget(clients, left),
        parties=state.parties,
        claimed=None if (claims := server.method.claims) is None else claims(server.state.policy, server.public),
    )


def reserved_by_budget(clients: Sequence[ClientFacts], left: Mapping[str, float]) -> dict[str, float]:
    """Share of plan or filter that is reserved, in the mean over the clients that grant the same ε (R3).

    A share and no ε: what was spent so far is no guarantee. Who grants ∞ has nothing that could be reserved.
    """
    shares: dict[float, list[float]] = {}
    for facts in clients:
        if facts.name in left and math.isfinite(facts.budget):
            shares.setdefault(facts.budget, []).append(1 - left[facts.name])
    return {f"{budget:g}": statistics.fmean(group) for budget, group in sorted(shares.items())}
