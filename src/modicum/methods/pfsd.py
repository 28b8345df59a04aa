"""pFSD: personalised models by self-decoupled distillation, without privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.mechanisms.clear import Clear
from modicum.methods.options import option
from modicum.methods.personalised import distilled, local_steps, server_step
from modicum.policies import Fixed

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class Pfsd:
    """Self-decoupled distillation from each client's last model, without privacy (ε = ∞)."""

    alpha: float = option(0.5, "weight α of the cross-entropy; 1 − α is that of the distillation")
    temperature: float = option(3.0, "distillation temperature KT")
    non_target: float = option(0.25, "weight 𝒩 of the non-target classes")
    target: float = option(1.0, "weight of the target term (0 for an ablation)")
    lr: float = option(0.05, "learning rate of the clients")
    momentum: float = option(0.9, "momentum of the clients, from 0 up to 1")
    batch: int = option(64, "records in a minibatch")
    steps: int | None = option(5, "Q: minibatches of a round; none: local_epochs passes")
    local_epochs: float = option(1.0, "passes over a client's records in a round, where steps is none")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        return Method(
            name="pfsd",
            training=distilled(self),
            policy=Fixed(),
            mechanism=Clear(local=local_steps(self)),
            aggregation=server_step(self.server_lr, self.server_momentum),
        )
