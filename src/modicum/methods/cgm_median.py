"""CGM_Median: the clipping bound is the median norm of the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.core.parts import Method, Policy
from modicum.parts.groups import Aggregated
from modicum.parts.levels import RecordOrClient
from modicum.parts.options import one_of, option
from modicum.policies import MedianNorm, NaiveMedianNorm
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: the bound is the median of the released norms with their noise left in, as published; it "
    "grows every round by about the noise's norm over the bound and diverges. ε holds, because these are norms of "
    "releases; a median of norms taken before the noise, another reading of the text, would have no finite ε."
)
HEADROOM = {"record": 4.0, "client": 1.5}


@dataclass(frozen=True, kw_only=True)
class CgmMedian(RecordOrClient, Aggregated):
    """A clipping bound that follows the median of the released norms, with the noise taken out of them."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: norms without their noise, within limits; faithful: as published, which diverges"
    )
    clip: float = option(1.0, "first clipping bound C₀; sound mode stays between C₀/100 and 100·C₀")
    headroom: float | None = option(
        None,
        "sound mode: the bound over the median norm; none: 4 for records, whose gradients cancel in part, and 1.5 "
        "for clients",
    )
    doubt: float = option(3.0, "sound mode: standard errors by which the median must stand out for C to move")

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        one_of("level", self.level, ("record", "client"))
        sound = self.mode == "sound"
        headroom = HEADROOM[self.level] if self.headroom is None else self.headroom
        policy: Policy = MedianNorm(self.clip, headroom, self.doubt) if sound else NaiveMedianNorm(self.clip)
        mechanism = self.mechanism(setting)
        return Method(
            name="cgm-median",
            training=Supervised(self.local_optimiser()),
            policy=policy,
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
            notes=() if sound else (FAITHFUL,),
        )
