"""The worst case for an audit: a model whose gradients the adversary writes into the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.core.clips import Clip
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.layout import Layout
from modicum.core.messages import Opened
from modicum.core.optimisers import Optimiser, Sgd
from modicum.core.parts import Backend as AnyBackend
from modicum.core.parts import Batch, Losses, State

LAYERS = ("first", "second")


class ProbeBackend:
    """Each record is its own gradient, times the sign of the model's first parameter, which the server sends.

    No mechanism can be attacked harder than with gradients of the adversary's choice: neighbouring data differ by
    the whole bound in a known direction. It is also cheap, so thousands of runs take seconds.
    """

    def __init__(self, dimension: int = 4) -> None:
        half = dimension // 2
        self.layout = Layout(LAYERS, ((half,), (dimension - half,)))

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return x[:, :2]

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        rows = [_sign(t) * b.x.sum(0) / max(1, len(b)) for t, b in zip(theta, batches, strict=True)]
        return torch.stack(rows)

    def clipped_sums(
        self,
        theta: Tensor,
        batches: Sequence[Batch],
        losses: Losses,
        clips: Sequence[Clip],
    ) -> tuple[Tensor, list[Tensor]]:
        gradients = [_of_examples(b) for b in batches]
        norms = [g.norm(dim=1) for g in gradients]
        sums = [
            _sign(t) * (g * (clip.bound / n.clamp(min=1e-300)).clamp(max=1.0)[:, None]).sum(0)
            for t, g, n, clip in zip(theta, gradients, norms, clips, strict=True)
        ]
        return torch.stack(sums), norms


def _of_examples(batch: Batch) -> Tensor:
    """A record is its own gradient; a person's is the mean of the rows that are there."""
    x: Tensor = batch.x
    if x.dim() == 2:
        return x
    there = batch.targets["y"][..., :1].to(x)
    return (x * there).sum(1) / there.sum(1).clamp_min(1)


def _sign(theta: Tensor) -> float:
    return 1.0 if theta[0].item() >= 0 else -1.0


@dataclass(frozen=True)
class ProbeTraining:
    """Plain gradient descent of step 1, so that an update is the sum of the releases."""

    optimiser: Optimiser = field(default_factory=lambda: Sgd(1.0))

    by_record = True

    def targets(self, records: Batch, state: State, backend: AnyBackend) -> dict[str, Tensor]:
        return dict(records.targets)

    def losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        return outputs.sum(1)

    def finish(self, records: Batch, state: State, trained: Tensor, backend: AnyBackend) -> State:
        return state


@dataclass(frozen=True)
class Turning:
    """The adversary's aggregation: whatever comes, the next model points the other way."""

    needs_individuals = False

    def init(self, public: PublicFacts) -> State:
        return {}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        return -model, state
