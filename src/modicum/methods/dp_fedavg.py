"""DP-FedAvg: each client's whole update is clipped and hidden (McMahan et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.mechanisms.client_level import ClientLevel
from modicum.parts.groups import Aggregated, ClientLevelView, Guarantee, Minibatches, Optimised
from modicum.parts.options import option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class DpFedAvg(Minibatches, Optimised, ClientLevelView, Aggregated, Guarantee):
    """Client-level privacy with a fixed clipping bound: whole updates are clipped, averaged and noised."""

    clip: float = option(1.0, "clipping bound C of a client's update")

    def build(self, setting: Setting) -> Method:
        mechanism = ClientLevel(
            view=self.build_view(setting),
            local=self.local_steps(),
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            rate=self.rate,
        )
        return Method(
            name="dp-fedavg",
            training=Supervised(self.local_optimiser()),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
        )
