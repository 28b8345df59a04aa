"""DP-pFSD: ACDP-pFSD with a fixed clipping bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.papers.acdp_pfsd.groups import ClientLevelOptions, Distillation
from modicum.parts.groups import ServerStep
from modicum.parts.options import option
from modicum.policies import Fixed

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class DpPfsd(Distillation, ClientLevelOptions, ServerStep):
    """Self-distilled personalised models under client-level privacy, with a fixed clipping bound."""

    clip: float = option(0.5, "clipping bound C of a client's update (published: 0.5 for EMNIST, 1.5 for others)")

    def build(self, setting: Setting) -> Method:
        return Method(
            name="dp-pfsd",
            training=self.distilled(),
            policy=Fixed(self.clip),
            mechanism=self.client_level(setting),
            aggregation=self.server_step(),
        )
