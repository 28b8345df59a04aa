"""FedAvg: federated averaging without privacy (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.optimisers import Sgd
from modicum.core.parts import Method
from modicum.mechanisms.clear import Clear
from modicum.parts.groups import Aggregated, Minibatches
from modicum.parts.options import AggregationName, option
from modicum.policies import Fixed
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class FedAvg(Minibatches, Aggregated):
    """Federated averaging without privacy: the reference that shows what privacy costs (ε = ∞)."""

    momentum: float = option(0.0, "momentum of the clients, from 0 up to 1")
    aggregation: AggregationName = option(
        "weighted", "weighted (by records), mean, trimmed-mean, median or norm-bounded"
    )

    def build(self, setting: Setting) -> Method:
        mechanism = Clear(local=self.local_steps())
        return Method(
            name="fedavg",
            training=Supervised(Sgd(self.lr, self.momentum)),
            policy=Fixed(),
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
        )
