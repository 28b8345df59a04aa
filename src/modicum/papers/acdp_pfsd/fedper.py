"""FedPer: the last layers stay with each client (Arivazhagan et al. 2019), without privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.optimisers import Sgd
from modicum.core.parts import Method, Plain
from modicum.errors import UserError
from modicum.mechanisms.clear import Clear
from modicum.papers.acdp_pfsd.groups import PersonalTraining
from modicum.parts.groups import ServerStep
from modicum.parts.options import option
from modicum.policies import Fixed
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class FedPer(PersonalTraining, ServerStep):
    """Shared first layers and personal last ones, without privacy (ε = ∞). The server's own model is untrained."""

    personal: str = option(
        "fc1,stage4_1,head",
        "names that personal parameters start with: the last two layers of cnn8, the final block of resnet18",
    )

    def build(self, setting: Setting) -> Method:
        names = tuple(name.strip() for name in self.personal.split(",") if name.strip())
        if not names:
            raise UserError("FedPer needs personal parameters: set personal, for instance to head")
        return Method(
            name="fedper",
            training=Supervised(Sgd(self.lr, self.momentum)),
            policy=Fixed(),
            mechanism=Clear(local=self.local_steps()),
            aggregation=self.server_step(),
            wrapper=Plain(names),
        )
