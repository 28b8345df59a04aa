"""DP-SGD inside each client, with a fixed bound (Abadi et al. 2016) or automatic clipping (Bu et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import ClipRule, Method
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods.options import (
    AdjacencyName,
    AggregationName,
    RuleName,
    build_aggregation,
    one_of,
    option,
)
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class DpSgd:
    """Record-level privacy with a fixed clipping bound, made by each client for itself with its own budget."""

    clip: float = option(1.0, "clipping bound C of one record's gradient")
    rule: RuleName = option("flat", "flat: g·min(1, C/‖g‖); auto: every gradient is scaled to about C (AUTO-S)")
    lr: float = option(1.0, "learning rate of the clients")
    batch: int | None = option(None, "expected size of a client's secret Poisson batches; none: all records")
    epochs: float = option(1.0, "passes over its records that a client makes in a round")
    steps: int | None = option(None, "local steps a round; overrides epochs")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    aggregation: AggregationName | None = option(
        None, "mean, weighted (by records) or noise-aware; none: noise-aware, and mean where only a sum is seen"
    )
    noise_multiplier: float | None = option(None, "noise over bound in each step; none: calibrated to the budget")
    adjacency: AdjacencyName = option("zero-out", "how neighbouring datasets differ in one record")
    delta: float = option(1e-5, "δ of the guarantee")

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        one_of("clipping rule", self.rule, ("flat", "auto"))
        mechanism = RecordLocal(
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            rule=ClipRule(self.rule),
            noise_multiplier=self.noise_multiplier,
        )
        return Method(
            name="dp-sgd",
            training=Supervised(Sgd(self.lr)),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=build_aggregation(self.aggregation, self.server_lr, self.server_momentum, mechanism),
        )
