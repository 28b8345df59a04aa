"""Ordinary supervised training: cross-entropy on the client's labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import cross_entropy

from modicum.core.optimisers import Optimiser, Sgd
from modicum.core.parts import Backend, Batch, State


@dataclass(frozen=True)
class Supervised:
    """Minimises the mean cross-entropy; keeps nothing between rounds."""

    optimiser: Optimiser = field(default_factory=lambda: Sgd(0.1))

    by_record = True

    def targets(self, records: Batch, state: State, backend: Backend) -> dict[str, Tensor]:  # noqa: ARG002
        return dict(records.targets)

    def losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(outputs, targets["y"], reduction="none")

    def finish(self, records: Batch, state: State, trained: Tensor, backend: Backend) -> State:  # noqa: ARG002
        return state
