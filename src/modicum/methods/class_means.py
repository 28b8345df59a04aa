"""Class means: sums of public features by class, solved as a linear discriminant; steps may follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.aggregation.class_means import ClassMeans as Discriminant
from modicum.core.optimisers import Sgd
from modicum.core.parts import Method
from modicum.errors import UserError
from modicum.mechanisms.class_sums import ClassSums, LinearHead
from modicum.mechanisms.record_local import RecordLocal
from modicum.parts.groups import PrivacyOptions, SeenBy, ServerStep
from modicum.parts.options import AggregationName, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class ClassMeans(ServerStep, SeenBy, PrivacyOptions):
    """Record-level sums of features by class, solved as a linear discriminant; gradient steps may follow."""

    steps: int = option(0, "whole-batch gradient steps after the sums, one a round of the last so many; 0: none")
    share: float = option(0.2, "share of the budget (of μ²) for the sums where steps follow")
    counts: float = option(0.3, "κ: weight of a class's count beside its sum in the release")
    clip: float = option(0.5, "clipping bound C of one record's gradient in the steps")
    lr: float = option(1.0, "learning rate of the steps")

    def build(self, setting: Setting) -> Method:
        if not 0 <= self.steps < setting.rounds:
            raise UserError(
                f"of {setting.rounds} rounds at least one is for the sums: {self.steps} steps are too many"
            )
        if (self.aggregation or self.threshold) and not self.steps:
            raise UserError(
                "class sums are joined by their precisions; aggregation and threshold say how the steps after "
                "them are: set steps, or leave aggregation out"
            )
        rounds = setting.rounds - self.steps
        promise = {"adjacency": Adjacency(self.adjacency), "delta": self.delta}
        sums = self.sums_of_records(setting, Sgd(self.lr), **promise)
        after = (
            RecordLocal(steps=1, adjacency=Adjacency(self.adjacency), delta=self.delta) if sums is None else sums
        )
        join: AggregationName = "noise-aware" if sums is None else "mean"
        return Method(
            name="class-means",
            training=Supervised(Sgd(self.lr)),
            policy=Fixed(self.clip),
            mechanism=ClassSums(
                rounds=rounds, total=setting.rounds, counts=self.counts, share=self.share, after=after
            ),
            aggregation=Discriminant(rounds, self.server_step(self.aggregation or join)),
            wrapper=LinearHead(),
        )
