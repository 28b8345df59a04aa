"""NbAFL: noise before aggregation (Wei et al. 2020), at the record-level budgets that PAC-DP compares it at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.aggregation.downlink import DownlinkNoise
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.parts import Aggregation, Mechanism, Method
from modicum.mechanisms.as_published import AsPublished
from modicum.mechanisms.client_level import ClientLevel
from modicum.parts.groups import Aggregated, Minibatches, Optimised
from modicum.parts.options import AggregationName, one_of, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: budgets are the ε that the paper claims, from σ = c·T·Δs/ε with Δs = 2C/n; the sensitivity of "
    "a trained and clipped model is 2C, whatever n, and the certificate holds the ε that follows from it"
)


@dataclass(frozen=True, kw_only=True)
class NbAfl(Minibatches, Optimised, Aggregated):
    """Each client trains as usual, clips what it has learned, and adds noise to it before it is sent."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: noise for the true sensitivity 2C; faithful: for 2C/n, with noise on the way down"
    )
    clip: float = option(1.0, "clipping bound C of a client's update")
    aggregation: AggregationName | None = option(
        "weighted", "weighted (as published), mean, noise-aware, trimmed-mean, median or norm-bounded"
    )
    delta: float = option(1e-5, "δ of the guarantee")

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        # One replaced record can move a trained model anywhere, so what protects it is the bound on the whole
        # update: the guarantee for a replaced client, which holds for each of its records too.
        inner = ClientLevel(
            local=self.local_steps(),
            adjacency=Adjacency.REPLACE_ONE,
            delta=self.delta,
        )
        mechanism: Mechanism = inner
        aggregation: Aggregation = self.aggregated(inner)
        if self.mode == "faithful":
            mechanism = AsPublished(inner, lambda facts: self._uplink(facts, setting.rounds) / self.clip)
            aggregation = DownlinkNoise(aggregation, self._downlink)
        return Method(
            name="nbafl",
            training=Supervised(self.local_optimiser()),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=aggregation,
            notes=(FAITHFUL,) if self.mode == "faithful" else (),
        )

    def _uplink(self, facts: ClientFacts, rounds: int) -> float:
        """σ_U = c·L·Δs/ε with exposures L = T and Δs = 2C/n (Wei et al. 2020, Eq. 16)."""
        c = math.sqrt(2 * math.log(1.25 / self.delta))
        return c * rounds * 2 * self.clip / (facts.records * facts.budget)

    def _downlink(self, public: PublicFacts) -> float:
        """σ_D = 2cC·√(T² − L²N)/(nNε) where T > L√N, else 0, for the strictest client (Theorem 1)."""
        rounds, clients = public.rounds, len(public.clients)
        exposures = max(c.participations for c in public.clients)
        inside = rounds**2 - exposures**2 * clients
        if inside <= 0:
            return 0.0
        c = math.sqrt(2 * math.log(1.25 / self.delta))
        least = min(client.records * client.budget for client in public.clients)
        return 2 * c * self.clip * math.sqrt(inside) / (least * clients)
