"""Soteria (Sun et al. 2021): what a linear layer learned from its most telling inputs is not sent. No guarantee.

A heuristic against one kind of inversion, kept to show what it is worth: ε = ∞ in the ledger. An attacker who
leaves the pruned tensor out of its objective is back where it was (Balunovic et al. 2022; `docs/attacks.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from modicum.core.needs import Need
from modicum.core.parts import ClientKit, Job
from modicum.errors import UserError
from modicum.mechanisms.clear import Clear

MOST_RECORDS = 16  # whose sensitivities are added up
ROOM = 0.1  # in |r_j| + 0.1


@dataclass(frozen=True, kw_only=True)
class Soteria(Clear):
    """Zeroes those columns of the first linear layer's update whose inputs r_j have s_j under the percentile:
    s_j = Σ ‖∂r_j/∂x‖/(|r_j| + 0.1) over the client's records."""

    percentile: float = 60.0

    needs = (Need.NUMBERS,)

    def __post_init__(self) -> None:
        if not 0 < self.percentile < 100:
            raise UserError(f"Soteria's percentile lies between 0 and 100, got {self.percentile}")

    def check_layers(self, model: nn.Module) -> None:
        """Only a sequence of layers with a linear one can be pruned."""
        first_linear(model)

    def _moved(self, job: Job, kit: ClientKit, initial: Tensor, last: Tensor) -> Tensor:
        moved = super()._moved(job, kit, initial, last)
        model = getattr(kit.backend, "model", None)
        name, before = first_linear(model)
        scores = sensitivities(kit, before, initial, job.records.x[:MOST_RECORDS])
        pruned = scores < torch.quantile(scores, self.percentile / 100)
        weight = kit.backend.layout.named(moved)[f"{name}.weight"]
        weight[:, pruned] = 0.0
        return moved


def first_linear(model: object) -> tuple[str, nn.Sequential]:
    """The name of the first linear layer of a sequence, and what comes before it."""
    if isinstance(model, nn.Sequential):
        before: list[tuple[str, nn.Module]] = []
        for name, layer in model.named_children():
            if isinstance(layer, nn.Linear):
                front = nn.Sequential()
                for known, part in before:
                    front.add_module(known, part)
                return name, front
            before.append((name, layer))
    raise UserError("Soteria prunes the first linear layer of a sequence of layers, and this model is none")


def sensitivities(kit: ClientKit, before: nn.Sequential, theta: Tensor, x: Tensor) -> Tensor:
    """s_j of every input of the layer."""
    named = {
        name: value
        for name, value in kit.backend.layout.named(theta).items()
        if name.partition(".")[0] in dict(before.named_children())
    }

    def inputs(row: Tensor) -> Tensor:
        out: Tensor = functional_call(before, named, (row[None],))
        return out.flatten()

    each = vmap(inputs)(x)
    slopes = vmap(jacrev(inputs))(x).flatten(2).norm(dim=2)
    scores: Tensor = (slopes / (each.abs() + ROOM)).sum(0)
    return scores
