"""pFedSD: personalised models by ordinary self-distillation, without privacy (Jin et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.mechanisms.clear import Clear
from modicum.methods.options import option
from modicum.methods.personalised import local_steps, server_step
from modicum.policies import Fixed
from modicum.training.distilled import Distilled
from modicum.training.optimisers import Sgd

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class PFedSd:
    """Ordinary distillation from each client's last model, without privacy (ε = ∞)."""

    alpha: float = option(0.5, "weight of the cross-entropy; the rest is that of the distillation")
    temperature: float = option(3.0, "distillation temperature")
    lr: float = option(0.05, "learning rate of the clients")
    momentum: float = option(0.9, "momentum of the clients, from 0 up to 1")
    batch: int = option(64, "records in a minibatch")
    steps: int | None = option(5, "minibatches of a round; none: local_epochs passes")
    local_epochs: float = option(1.0, "passes over a client's records in a round, where steps is none")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        return Method(
            name="pfedsd",
            training=Distilled(Sgd(self.lr, self.momentum), self.alpha, self.temperature, non_target=None),
            policy=Fixed(),
            mechanism=Clear(local=local_steps(self)),
            aggregation=server_step(self.server_lr, self.server_momentum),
        )
