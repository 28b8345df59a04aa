"""pFedSD: personalised models by ordinary self-distillation, without privacy (Jin et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.optimisers import Sgd
from modicum.core.parts import Method
from modicum.mechanisms.clear import Clear
from modicum.papers.acdp_pfsd.distilled import Distilled
from modicum.papers.acdp_pfsd.groups import PRIOR, PersonalTraining
from modicum.parts.groups import ServerStep
from modicum.parts.options import option
from modicum.policies import Fixed

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class PFedSd(PersonalTraining, ServerStep):
    """Ordinary distillation from each client's last model, without privacy (ε = ∞)."""

    alpha: float = option(0.5, "weight of the cross-entropy; the rest is that of the distillation")
    temperature: float = option(3.0, "distillation temperature")
    prior: float = option(0.0, PRIOR)

    def build(self, setting: Setting) -> Method:
        return Method(
            name="pfedsd",
            training=Distilled(
                Sgd(self.lr, self.momentum), self.alpha, self.temperature, non_target=None, prior=self.prior
            ),
            policy=Fixed(),
            mechanism=Clear(local=self.local_steps()),
            aggregation=self.server_step(),
        )
