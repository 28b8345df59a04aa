"""FedProx: local training held back to the server's model (Li et al. 2020), under client-level privacy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modicum.core.parts import Method
from modicum.methods.dp_fedavg import DpFedAvg
from modicum.parts.options import option
from modicum.training.proximal import Proximal

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class FedProx(DpFedAvg):
    """Client-level privacy as in dp-fedavg; a proximal term keeps local models near the server's."""

    mu: float = option(0.1, "proximal weight μ, at least 0; 0 is dp-fedavg")

    def build(self, setting: Setting) -> Method:
        # min_θ F_i(θ) + μ/2·‖θ − θ_t‖² (Eq. 2). Whatever it makes of an update, the bound on that update holds.
        training = Proximal(self.local_optimiser(), self.mu)
        return replace(super().build(setting), name="fedprox", training=training)
