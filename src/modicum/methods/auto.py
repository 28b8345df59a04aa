"""The default method: a linear head on public features, with every setting decided from public facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from modicum.aggregation import Momentum, Paced
from modicum.core.optimisers import Sgd
from modicum.core.parts import Mechanism, Method
from modicum.mechanisms.record_local import RecordLocal
from modicum.parts.groups import PrivacyOptions, SeenBy
from modicum.parts.options import AggregationName, build_aggregation, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised
from modicum.training.small_bias import SmallBias

if TYPE_CHECKING:
    from modicum.core.setting import Setting

CLIP = 0.3  # of gradients that reach 1.5: only their direction counts, until a record is understood
LOGIT_NOISE, WIDE_NOISE = 1.2, 0.6  # the second on features of a large public network, which tell classes apart
MOMENTUM, AVERAGE = 0.5, 0.5


@dataclass(frozen=True, kw_only=True)
class Auto(SeenBy, PrivacyOptions):
    """Record-level steps on public features whose every setting is decided from public facts; nothing to tune."""

    public_features: ClassVar[bool] = True  # where none are named and there is a dataset to fit them to

    aggregation: AggregationName | None = option(
        None,
        "mean, weighted, trimmed-mean, median, norm-bounded against hostile clients; none: noise-aware, and mean "
        "where only a sum is seen",
    )

    def build(self, setting: Setting) -> Method:
        step, adjacency = Sgd(1.0), Adjacency(self.adjacency)
        sums = self.sums_of_records(setting, step, adjacency=adjacency, delta=self.delta)
        mechanism: Mechanism = sums or RecordLocal(steps=1, adjacency=adjacency, delta=self.delta)
        head = SmallBias()
        joined: AggregationName = self.aggregation or ("noise-aware" if mechanism.individuals else "mean")
        return Method(
            name="auto",
            training=Supervised(step),
            policy=Fixed(CLIP),
            mechanism=mechanism,
            aggregation=Paced(
                Momentum(build_aggregation(joined, 1.0, 0.0), MOMENTUM),
                CLIP,
                LOGIT_NOISE,
                WIDE_NOISE,
                summed=not mechanism.individuals,
                constant=head.length,
            ),
            wrapper=head,
            public_start=True,
            average=AVERAGE,
        )
