"""DP-FedAvg: each client's whole update is clipped and hidden (McMahan et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.local_steps import LocalSteps
from modicum.methods.options import (
    AdjacencyName,
    AggregationName,
    ViewName,
    build_aggregation,
    build_view,
    option,
)
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class DpFedAvg:
    """Client-level privacy with a fixed clipping bound: whole updates are clipped, averaged and noised."""

    clip: float = option(1.0, "clipping bound C of a client's update")
    view: ViewName = option(
        "secure-aggregation",
        "who must not learn: server-sees-messages, secure-aggregation (only sums are seen), or trusted-server",
    )
    tolerated: int = option(1, "clients that may collude or drop out of a round behind secure aggregation")
    rate: float | None = option(None, "rate of a trusted server's secret Poisson cohort; none: public cohorts")
    lr: float = option(0.5, "learning rate of the clients")
    batch: int = option(32, "records in a minibatch")
    epochs: float = option(1.0, "passes over its records that a client makes in a round")
    steps: int | None = option(None, "minibatches a client takes in a round; overrides epochs")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    aggregation: AggregationName | None = option(
        None, "mean, weighted (by records) or noise-aware; none: noise-aware, and mean where only a sum is seen"
    )
    noise_multiplier: float | None = option(None, "noise over bound as the adversary sees it; none: calibrated")
    adjacency: AdjacencyName = option("zero-out", "how neighbouring datasets differ in one client")
    delta: float = option(1e-5, "δ of the guarantee")

    def build(self, setting: Setting) -> Method:
        mechanism = ClientLevel(
            view=build_view(self.view, setting.per_round, self.tolerated),
            local=LocalSteps(self.batch, self.steps, self.epochs),
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            rate=self.rate,
        )
        return Method(
            name="dp-fedavg",
            training=Supervised(Sgd(self.lr)),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=build_aggregation(self.aggregation, self.server_lr, self.server_momentum, mechanism),
        )
