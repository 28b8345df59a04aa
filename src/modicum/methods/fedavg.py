"""FedAvg: federated averaging without privacy (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.mechanisms.clear import Clear
from modicum.mechanisms.local_steps import LocalSteps
from modicum.methods.options import AggregationName, build_aggregation, option
from modicum.policies import Fixed
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """Federated averaging without privacy: the reference that shows what privacy costs (ε = ∞)."""

    lr: float = option(0.5, "learning rate of the clients")
    momentum: float = option(0.0, "momentum of the clients, from 0 up to 1")
    batch: int = option(32, "records in a minibatch")
    epochs: float = option(1.0, "passes over its records that a client makes in a round")
    steps: int | None = option(None, "minibatches a client takes in a round; overrides epochs")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    aggregation: AggregationName = option("weighted", "mean, or weighted by the clients' numbers of records")

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        mechanism = Clear(local=LocalSteps(self.batch, self.steps, self.epochs))
        return Method(
            name="fedavg",
            training=Supervised(Sgd(self.lr, self.momentum)),
            policy=Fixed(),
            mechanism=mechanism,
            aggregation=build_aggregation(self.aggregation, self.server_lr, self.server_momentum, mechanism),
        )
