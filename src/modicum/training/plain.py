"""Ordinary supervised training: the task's loss on the client's labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from modicum.core.optimisers import Optimiser, Sgd
from modicum.core.parts import Backend, Batch, State
from modicum.tasks import CLASSIFICATION, Task


@dataclass(frozen=True)
class Supervised:
    """Minimises the mean loss of the task; keeps nothing between rounds."""

    optimiser: Optimiser = field(default_factory=lambda: Sgd(0.1))
    task: Task = field(default=CLASSIFICATION, kw_only=True, repr=False)  # the experiment puts its own here

    by_record = True

    def targets(self, records: Batch, state: State, backend: Backend) -> dict[str, Tensor]:
        return dict(records.targets)

    def losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        return self.task.losses(outputs, targets["y"])

    def finish(self, records: Batch, state: State, trained: Tensor, backend: Backend) -> State:
        return state
