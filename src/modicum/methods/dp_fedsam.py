"""DP-FedSAM: client-level privacy with sharpness-aware local training (Shi et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.errors import UserError
from modicum.methods.options import AdjacencyName, ViewName, option
from modicum.methods.personalised import client_level, server_step
from modicum.policies import Fixed
from modicum.training.distilled import Distilled
from modicum.training.optimisers import Sgd

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class DpFedSam:
    """Whole updates clipped at a fixed bound and noised; each local gradient is taken uphill of the weights."""

    clip: float = option(0.5, "clipping bound C of a client's update")
    ascent: float = option(0.05, "radius ρ of the step uphill before each gradient")
    lr: float = option(0.05, "learning rate of the clients")
    momentum: float = option(0.9, "momentum of the clients, from 0 up to 1")
    batch: int = option(64, "records in a minibatch")
    steps: int | None = option(5, "minibatches of a round; none: local_epochs passes")
    local_epochs: float = option(1.0, "passes over a client's records in a round, where steps is none")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    view: ViewName = option("secure-aggregation", "who must not learn")
    tolerated: int = option(1, "clients that may collude or drop out of a round behind secure aggregation")
    rate: float | None = option(None, "rate of a trusted server's secret Poisson cohort; none: public cohorts")
    noise_multiplier: float | None = option(None, "noise over bound as the adversary sees it; none: calibrated")
    adjacency: AdjacencyName = option("zero-out", "how neighbouring datasets differ in one client")
    delta: float | None = option(1e-5, "δ of the guarantee; none: P^−1.1 with P clients")

    def build(self, setting: Setting) -> Method:
        if not 0 < self.ascent < float("inf"):
            raise UserError(f"the radius of the step uphill must be positive and finite, got {self.ascent}")
        return Method(
            name="dp-fedsam",
            # The local model is kept as the personalised one, to be compared with the personalised methods.
            training=Distilled(Sgd(self.lr, self.momentum), alpha=1.0),
            policy=Fixed(self.clip),
            mechanism=client_level(self, setting, self.ascent),
            aggregation=server_step(self.server_lr, self.server_momentum),
        )
