"""DP-SGD inside each client, with a fixed bound (Abadi et al. 2016) or automatic clipping (Bu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.clips import Auto, Clip, Flat, PerLayer
from modicum.core.parts import Method
from modicum.errors import UserError
from modicum.parts.groups import Aggregated, Guarantee, RecordSteps
from modicum.parts.options import RuleName, one_of, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class DpSgd(RecordSteps, Aggregated, Guarantee):
    """Record-level privacy with a fixed clipping bound, made by each client for itself with its own budget."""

    clip: float | dict[str, float] = option(
        1.0,
        "clipping bound C of one record's gradient, or a table of bounds C_k by layer (C² = ΣC_k²)",
        table=True,
    )
    rule: RuleName = option("flat", "flat: g·min(1, C/‖g‖); auto: every gradient is scaled to about C (AUTO-S)")

    def build(self, setting: Setting) -> Method:
        rule = self._rule()
        mechanism = self.record_level(
            setting,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            rule=rule,
            noise_multiplier=self.noise_multiplier,
        )
        return Method(
            name="dp-sgd",
            training=Supervised(self.local_optimiser()),
            policy=Fixed(rule.bound),
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
        )

    def _rule(self) -> Clip:
        one_of("clipping rule", self.rule, ("flat", "auto"))
        if isinstance(self.clip, float | int):
            return Auto(self.clip) if self.rule == "auto" else Flat(self.clip)
        if self.rule == "auto":
            raise UserError("automatic clipping has one bound for all layers: give clip as a number")
        return PerLayer(self.clip)
