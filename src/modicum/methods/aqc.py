"""AQC: adaptive quantile clipping (Andrew et al. 2021), at record or client level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.parts.groups import Aggregated
from modicum.parts.levels import RecordOrClient
from modicum.parts.options import option
from modicum.policies import AdaptiveQuantile
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Aqc(RecordOrClient, Aggregated):
    """A clipping bound that follows a quantile of the norms, by noisy bits bought in the same query."""

    clip: float = option(1.0, "first clipping bound C₀")
    quantile: float = option(0.5, "share γ of norms that should stay unclipped")
    clip_lr: float = option(0.2, "rate η of the bound's geometric update")
    bit_ratio: float = option(
        10.0, "noise multiplier of the bits over that of the query: 10 costs 0.5% more noise"
    )

    def build(self, setting: Setting) -> Method:
        mechanism = self.mechanism(setting)
        return Method(
            name="aqc",
            training=Supervised(self.local_optimiser()),
            policy=AdaptiveQuantile(self.clip, self.quantile, self.clip_lr, self.bit_ratio),
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
        )
