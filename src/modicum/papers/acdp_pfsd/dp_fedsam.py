"""DP-FedSAM: client-level privacy with sharpness-aware local training (Shi et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.optimisers import Sgd
from modicum.core.parts import Method
from modicum.errors import UserError
from modicum.papers.acdp_pfsd.distilled import Distilled
from modicum.papers.acdp_pfsd.groups import PRIOR, ClientLevelOptions
from modicum.parts.groups import ServerStep
from modicum.parts.options import option
from modicum.policies import Fixed

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class DpFedSam(ClientLevelOptions, ServerStep):
    """Whole updates clipped at a fixed bound and noised; each local gradient is taken uphill of the weights."""

    clip: float = option(0.5, "clipping bound C of a client's update")
    ascent: float = option(0.05, "radius ρ of the step uphill before each gradient")
    prior: float = option(0.0, PRIOR)

    def build(self, setting: Setting) -> Method:
        if not 0 < self.ascent < float("inf"):
            raise UserError(f"the radius of the step uphill must be positive and finite, got {self.ascent}")
        return Method(
            name="dp-fedsam",
            # The local model is kept as the personalised one, to be compared with the personalised methods.
            training=Distilled(Sgd(self.lr, self.momentum), alpha=1.0, prior=self.prior),
            policy=Fixed(self.clip),
            mechanism=self.client_level(setting, self.ascent),
            aggregation=self.server_step(),
        )
