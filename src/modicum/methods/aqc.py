"""AQC: adaptive quantile clipping (Andrew et al. 2021), at record or client level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.methods.levels import Level, mechanism_for
from modicum.methods.options import AdjacencyName, AggregationName, ViewName, build_aggregation, option
from modicum.policies import AdaptiveQuantile
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class Aqc:
    """A clipping bound that follows a quantile of the norms, by noisy bits bought in the same query."""

    level: Level = option("record", "what is protected and clipped: each record, or each client as a whole")
    clip: float = option(1.0, "first clipping bound C₀")
    quantile: float = option(0.5, "share γ of norms that should stay unclipped")
    clip_lr: float = option(0.2, "rate η of the bound's geometric update")
    bit_ratio: float = option(
        10.0, "noise multiplier of the bits over that of the query: 10 costs 0.5% more noise"
    )
    view: ViewName = option("server-sees-messages", "who must not learn, at client level")
    tolerated: int = option(1, "clients that may collude or drop out of a round behind secure aggregation")
    lr: float = option(0.5, "learning rate of the clients")
    batch: int | None = option(
        None, "record level: expected Poisson batch (none: all records); client level: minibatch (none: 32)"
    )
    epochs: float = option(1.0, "passes over its records that a client makes in a round")
    steps: int | None = option(None, "local steps a round; overrides epochs")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    aggregation: AggregationName | None = option(
        None, "mean, weighted (by records) or noise-aware; none: noise-aware, and mean where only a sum is seen"
    )
    noise_multiplier: float | None = option(None, "noise over bound as the adversary sees it; none: calibrated")
    adjacency: AdjacencyName = option("zero-out", "how neighbouring datasets differ in one unit")
    delta: float = option(1e-5, "δ of the guarantee")

    def build(self, setting: Setting) -> Method:
        mechanism = mechanism_for(self, setting)
        return Method(
            name="aqc",
            training=Supervised(Sgd(self.lr)),
            policy=AdaptiveQuantile(self.clip, self.quantile, self.clip_lr, self.bit_ratio),
            mechanism=mechanism,
            aggregation=build_aggregation(self.aggregation, self.server_lr, self.server_momentum, mechanism),
        )
