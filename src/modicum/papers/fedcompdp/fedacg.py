"""FedACG (Kim et al. 2024) with record-level privacy: clients begin where momentum is about to lead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.papers.fedcompdp.lookahead import Lookahead
from modicum.parts.groups import Guarantee, RecordSteps, by_records
from modicum.parts.options import AggregationName, build_aggregation, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised
from modicum.training.proximal import Proximal

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class FedAcg(RecordSteps, Guarantee):
    """Record-level steps from a lookahead model, with a proximal term after the noise."""

    clip: float = option(1.0, "clipping bound C of one record's gradient")
    momentum: float = option(0.85, "λ: momentum of the server, by which clients begin ahead")
    mu: float = option(1e-3, "proximal weight μ towards the model that was sent, added after the noise")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    aggregation: AggregationName | None = option(
        None, "weighted (by records), mean, noise-aware, …; none: weighted, and mean where only a sum is seen"
    )

    def build(self, setting: Setting) -> Method:
        mechanism = self.record_level(
            setting,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
        )
        training = Supervised(self.local_optimiser())
        if mechanism.individuals:  # behind a sum a round is one step, at whose start the term is 0
            training = Proximal(self.local_optimiser(), self.mu)
        base = build_aggregation(self.aggregation or by_records(mechanism), self.server_lr, 0.0)
        return Method(
            name="fedacg",
            training=training,
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=Lookahead(base, self.momentum),
        )
