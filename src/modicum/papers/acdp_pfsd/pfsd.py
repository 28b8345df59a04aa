"""pFSD: personalised models by self-decoupled distillation, without privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.mechanisms.clear import Clear
from modicum.papers.acdp_pfsd.groups import Distillation
from modicum.parts.groups import ServerStep
from modicum.policies import Fixed

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class Pfsd(Distillation, ServerStep):
    """Self-decoupled distillation from each client's last model, without privacy (ε = ∞)."""

    def build(self, setting: Setting) -> Method:
        return Method(
            name="pfsd",
            training=self.distilled(),
            policy=Fixed(),
            mechanism=Clear(local=self.local_steps()),
            aggregation=self.server_step(),
        )
