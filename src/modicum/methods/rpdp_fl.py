"""rPDP-FL: budgets met by personalised sampling of records (Liu et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.mechanisms.sampled_by_budget import SampledByBudget
from modicum.methods.options import AdjacencyName, AggregationName, build_aggregation, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class RpdpFl:
    """Record-level privacy with one noise for all and a sampling rate q(ε) for each budget."""

    clip: float = option(1.0, "clipping bound C of one record's gradient")
    full_budget: float = option(1.0, "the ε whose records all take part in each step; it sets the common noise")
    steps: int = option(1, "local steps a round")
    lr: float = option(1.0, "learning rate of the clients")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    aggregation: AggregationName | None = option(
        "weighted", "mean, weighted (by records, as published) or noise-aware"
    )
    adjacency: AdjacencyName = option("zero-out", "how neighbouring datasets differ in one record")
    delta: float = option(1e-5, "δ of the guarantee")

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        mechanism = SampledByBudget(
            steps=self.steps,
            full_budget=self.full_budget,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
        )
        return Method(
            name="rpdp-fl",
            training=Supervised(Sgd(self.lr)),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=build_aggregation(self.aggregation, self.server_lr, self.server_momentum, mechanism),
        )
