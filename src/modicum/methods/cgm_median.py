"""CGM_Median: the clipping bound is the median norm of the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.core.parts import Method, Policy
from modicum.methods.levels import Level, mechanism_for
from modicum.methods.options import (
    AdjacencyName,
    AggregationName,
    ViewName,
    build_aggregation,
    one_of,
    option,
)
from modicum.policies import MedianNorm, NaiveMedianNorm
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting

FAITHFUL = (
    "faithful mode: the bound is the median of the released norms with their noise left in, as published; it "
    "grows every round by about the noise's norm over the bound and diverges. ε holds, because these are norms of "
    "releases; a median of norms taken before the noise, another reading of the text, would have no finite ε."
)
HEADROOM = {"record": 4.0, "client": 1.5}


@dataclass(frozen=True, kw_only=True)
class CgmMedian:
    """A clipping bound that follows the median of the released norms, with the noise taken out of them."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: norms without their noise, within limits; faithful: as published, which diverges"
    )
    level: Level = option("record", "what is protected and clipped: each record, or each client as a whole")
    clip: float = option(1.0, "first clipping bound C₀; sound mode stays between C₀/100 and 100·C₀")
    headroom: float | None = option(
        None,
        "sound mode: the bound over the median norm; none: 4 for records, whose gradients cancel in part, and 1.5 "
        "for clients",
    )
    doubt: float = option(3.0, "sound mode: standard errors by which the median must stand out for C to move")
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
        one_of("mode", self.mode, ("sound", "faithful"))
        one_of("level", self.level, ("record", "client"))
        sound = self.mode == "sound"
        headroom = HEADROOM[self.level] if self.headroom is None else self.headroom
        policy: Policy = MedianNorm(self.clip, headroom, self.doubt) if sound else NaiveMedianNorm(self.clip)
        mechanism = mechanism_for(self, setting)
        return Method(
            name="cgm-median",
            training=Supervised(Sgd(self.lr)),
            policy=policy,
            mechanism=mechanism,
            aggregation=build_aggregation(self.aggregation, self.server_lr, self.server_momentum, mechanism),
            notes=() if sound else (FAITHFUL,),
        )
