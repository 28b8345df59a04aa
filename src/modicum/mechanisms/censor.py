"""CENSOR (Zhang et al. 2025): each tensor's update is replaced by a random one orthogonal to it. No guarantee.

Kept to show what it is worth: ε = ∞ in the ledger. A message still carries the exact length of every tensor's
update, which identifies the record among candidates (`docs/attacks.md`); after the tenth round it is the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.parts import Batch, ClientKit, Job
from modicum.errors import UserError
from modicum.mechanisms.clear import Clear

STEP = 1e-4  # at which a try is judged by the client's own loss


@dataclass(frozen=True, kw_only=True)
class Censor(Clear):
    """Of `tries` random u ⟂ g with ‖u‖ = ‖g‖ in every tensor, the one that most lowers the client's own loss.

    `as_coded` repeats two faults of the published code: the projection is divided by ‖g‖ in place of ‖g‖², so that
    some of g stays in; and where no try lowers the loss the raw update is sent.
    """

    tries: int = 20
    until: int = 10  # rounds; afterwards the update is sent as it is
    as_coded: bool = False

    def __post_init__(self) -> None:
        if self.tries < 1 or self.until < 0:
            raise UserError(
                f"CENSOR needs tries and rounds of at least 1 and 0, got {self.tries} and {self.until}"
            )

    def _moved(self, job: Job, kit: ClientKit, initial: Tensor, last: Tensor) -> Tensor:
        moved = super()._moved(job, kit, initial, last)
        if job.broadcast.round >= self.until:
            return moved
        generator = torch.Generator().manual_seed(job.seed & (2**63 - 1))
        records = Batch(job.records.x, kit.training.targets(job.records, job.state, kit.backend))
        least, best = _loss(kit, initial, records), None
        for _ in range(self.tries):
            tried = self._across(moved, kit, generator)
            loss = _loss(kit, initial + STEP * tried, records)
            if loss < least or (best is None and not self.as_coded):
                least, best = min(least, loss), tried
        return moved if best is None else best

    def _across(self, moved: Tensor, kit: ClientKit, generator: torch.Generator) -> Tensor:
        found = torch.empty_like(moved)
        for name, where in kit.backend.layout.slices().items():
            g = moved[where]
            r = torch.randn(g.shape, generator=generator).to(g)
            r = r / r.norm().clamp(min=1e-12)
            length = g.norm()
            over = length if self.as_coded else length**2
            u = r - (r @ g) / over.clamp(min=1e-12) * g
            found[where] = u * length / u.norm().clamp(min=1e-12) if kit.shared[where].all() else moved[where]
            if g.numel() == 1 and name:  # nothing is orthogonal to a single number but zero
                found[where] = r * length
        return found


def _loss(kit: ClientKit, theta: Tensor, records: Batch) -> float:
    return kit.training.losses(kit.backend.outputs(theta, records.x), records.targets).mean().item()
