"""DP-pFSD: ACDP-pFSD with a fixed clipping bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.methods.options import AdjacencyName, ViewName, option
from modicum.methods.personalised import client_level, distilled, server_step
from modicum.policies import Fixed

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class DpPfsd:
    """Self-distilled personalised models under client-level privacy, with a fixed clipping bound."""

    clip: float = option(0.5, "clipping bound C of a client's update (published: 0.5 for EMNIST, 1.5 for others)")
    alpha: float = option(0.5, "weight α of the cross-entropy; 1 − α is that of the distillation")
    temperature: float = option(3.0, "distillation temperature KT")
    non_target: float = option(0.25, "weight 𝒩 of the non-target classes")
    target: float = option(1.0, "weight of the target term (0 for an ablation)")
    lr: float = option(0.05, "learning rate of the clients")
    momentum: float = option(0.9, "momentum of the clients, from 0 up to 1")
    batch: int = option(64, "records in a minibatch")
    steps: int | None = option(5, "Q: minibatches of a round; none: local_epochs passes")
    local_epochs: float = option(1.0, "passes over a client's records in a round, where steps is none")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    view: ViewName = option("secure-aggregation", "who must not learn")
    tolerated: int = option(1, "clients that may collude or drop out of a round behind secure aggregation")
    rate: float | None = option(None, "rate of a trusted server's secret Poisson cohort; none: public cohorts")
    noise_multiplier: float | None = option(None, "σ: noise over bound in the sum; none: calibrated to the budget")
    adjacency: AdjacencyName = option("zero-out", "how neighbouring datasets differ in one client")
    delta: float | None = option(None, "δ of the guarantee; none: P^−1.1 as published")

    def build(self, setting: Setting) -> Method:
        return Method(
            name="dp-pfsd",
            training=distilled(self),
            policy=Fixed(self.clip),
            mechanism=client_level(self, setting),
            aggregation=server_step(self.server_lr, self.server_momentum),
        )
