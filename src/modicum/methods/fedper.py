"""FedPer: the last layers stay with each client (Arivazhagan et al. 2019), without privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.parts import Method, Plain
from modicum.errors import UserError
from modicum.mechanisms.clear import Clear
from modicum.methods.options import option
from modicum.methods.personalised import local_steps, server_step
from modicum.policies import Fixed
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


@dataclass(frozen=True, kw_only=True)
class FedPer:
    """Shared first layers and personal last ones, without privacy (ε = ∞). The server's own model is untrained."""

    personal: str = option(
        "fc1,stage4_1,head",
        "names that personal parameters start with: the last two layers of cnn8, the final block of resnet18",
    )
    lr: float = option(0.05, "learning rate of the clients")
    momentum: float = option(0.9, "momentum of the clients, from 0 up to 1")
    batch: int = option(64, "records in a minibatch")
    steps: int | None = option(5, "minibatches of a round; none: local_epochs passes")
    local_epochs: float = option(1.0, "passes over a client's records in a round, where steps is none")
    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        names = tuple(name.strip() for name in self.personal.split(",") if name.strip())
        if not names:
            raise UserError("FedPer needs personal parameters: set personal, for instance to head")
        return Method(
            name="fedper",
            training=Supervised(Sgd(self.lr, self.momentum)),
            policy=Fixed(),
            mechanism=Clear(local=local_steps(self)),
            aggregation=server_step(self.server_lr, self.server_momentum),
            wrapper=Plain(names),
        )
