"""DP-FedSAM's idea for records: sharpness-aware steps, each clipped by example, noised and charged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.fedcompdp.climbing import Climbing
from modicum.parts.groups import Aggregated, Guarantee, RecordSteps
from modicum.parts.options import AggregationName, messages_only, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class DpFedSamRecord(RecordSteps, Aggregated, Guarantee):
    """Record-level steps whose gradients are taken uphill, along the gradient that was released before."""

    clip: float = option(1.0, "clipping bound C of one record's gradient")
    ascent: float = option(0.05, "radius ρ of the step uphill; a round's first step has none")
    steps: int | None = option(5, "local steps a round, at least 2; none: by epochs")
    aggregation: AggregationName | None = option(
        "weighted", "weighted (by records), mean, noise-aware, trimmed-mean, median or norm-bounded"
    )

    def build(self, setting: Setting) -> Method:
        messages_only("climbing takes several steps of each client between two messages", self.view)
        if self.steps is not None and self.steps < 2:
            raise UserError(f"climbing needs a step before it: set steps to 2 or more, got {self.steps}")
        mechanism = RecordLocal(
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
        )
        return Method(
            name="dp-fedsam-record",
            training=Climbing(self.local_optimiser(), self.ascent),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
        )
