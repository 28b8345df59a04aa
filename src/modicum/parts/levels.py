"""Methods that come at record and at client level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.core.parts import Mechanism
from modicum.mechanisms.client_level import ClientLevel
from modicum.parts.groups import Guarantee, RecordSteps
from modicum.parts.options import build_view, one_of, option
from modicum.privacy.spec import Adjacency
from modicum.training.local_steps import LocalSteps

if TYPE_CHECKING:
    from modicum.core.setting import Setting

Level = Literal["record", "client"]
DEFAULT_BATCH = 32  # of ordinary local training, where a client's whole update is clipped


@dataclass(frozen=True, kw_only=True)
class RecordOrClient(RecordSteps, Guarantee):
    """The settings that decide such a mechanism."""

    level: Level = option("record", "what is protected and clipped: each record, or each client as a whole")
    lr: float = option(0.5, "learning rate of the clients")
    batch: int | None = option(
        None, "record level: expected Poisson batch (none: all records); client level: minibatch (none: 32)"
    )

    def mechanism(self, setting: Setting) -> Mechanism:
        """Record-level or client-level privacy, as `level` says."""
        one_of("level", self.level, ("record", "client"))
        adjacency = Adjacency(self.adjacency)
        if self.level == "client":
            return ClientLevel(
                view=build_view(self.view, setting.per_round, self.colluding, self.dropouts),
                local=LocalSteps(self.batch or DEFAULT_BATCH, self.steps, self.epochs),
                adjacency=adjacency,
                delta=self.delta,
                noise_multiplier=self.noise_multiplier,
            )
        return self.record_level(
            setting, adjacency=adjacency, delta=self.delta, noise_multiplier=self.noise_multiplier
        )
