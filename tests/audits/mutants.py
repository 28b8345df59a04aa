"""Deliberately broken mechanisms, each a small change to a sound one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from modicum.attacks.probe import ProbeBackend
from modicum.core.clips import Clip
from modicum.core.facts import PublicFacts
from modicum.core.layout import Layout
from modicum.core.messages import Decision
from modicum.core.parts import Batch, Losses, Observation, Place, Scope, Signal, State
from modicum.core.persons import Slot
from modicum.core.release_gate import ReleaseGate, ReleaseRequest, SumGate
from modicum.data.arrays import Arrays
from modicum.data.persons import grouped
from modicum.mechanisms import record_local
from modicum.mechanisms.record_steps import Stepper
from modicum.privacy.events import Release
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseKey, SimulatedNoise

Values = dict[str, Tensor]


class ChangedGate:
    """A gate whose releases are changed on the way out."""

    def __init__(self, inner: ReleaseGate) -> None:
        self.inner = inner

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.inner.tokens

    def reserve(self, release: Release) -> bool:
        return self.inner.reserve(release)

    def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
        return self.inner.sample(release, step, records, present)

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Values:
        return self.change(dict(sums), self.inner.release(release, step, sums), release)

    def change(self, sums: Values, noised: Values, release: Release) -> Values:
        return noised


class OneLayerBare(ChangedGate):
    """No noise on the second layer of the probe."""

    def change(self, sums: Values, noised: Values, release: Release) -> Values:
        main = release.blocks[0].name
        half = len(sums[main]) // 2
        return {**noised, main: torch.cat([noised[main][:half], sums[main][half:]])}


class NextBoundNoise(ChangedGate):
    """C is updated before the noise is drawn: clipped with C, noised for the next bound C/4."""

    def change(self, sums: Values, noised: Values, release: Release) -> Values:
        return {name: sums[name] + (noised[name] - sums[name]) / 4 for name in noised}


@dataclass
class ChangedGates:
    """Puts one of the gates above around every client's gate."""

    around: type[ChangedGate]

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        return self.around(gate)

    def server(self, gate: SumGate) -> SumGate:
        return gate


class ReusedSeed(SimulatedNoise):
    """The same noise in every round and step."""

    def normal(self, key: NoiseKey, *args: Any, **settings: Any) -> Any:
        return super().normal(replace(key, round=0, step=0), *args, **settings)


class RealisedBatchStepper(Stepper):
    """Divides by the size of the batch that was drawn."""

    def chosen(self, step: int) -> Tensor:
        drawn = super().chosen(step)
        self.expected = float(max(1, len(drawn)))
        return drawn


class ExtraStepStepper(Stepper):
    """Has every step released twice, charged once."""

    def request(self, step: int, total: Tensor, norms: Tensor) -> ReleaseRequest:
        request = super().request(step, total, norms)
        request.gate.release(request.release, request.step, request.sums)
        return request


class FourTensors(ProbeBackend):
    """The probe with its gradient in four tensors of two numbers."""

    def __init__(self) -> None:
        self.layout = Layout(("a", "b", "c", "d"), ((2,),) * 4)


class ClippedByTensor(FourTensors):
    """Each tensor of a gradient is clipped to C by itself, so that the whole is up to 2C long."""

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        parts = [
            super(ClippedByTensor, self).clipped_sums(
                theta, [Batch(b.x[:, where], b.targets) for b in batches], losses, clips
            )
            for where in self.layout.slices().values()
        ]
        return torch.cat([sums for sums, _ in parts], 1), parts[0][1]


class ClippedByRow(ProbeBackend):
    """Each row of a person is clipped to C, and their sum may be as many bounds long."""

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        rows = [Batch(b.x[b.targets["y"][..., 0] > 0], {}) for b in batches]
        return super().clipped_sums(theta, rows, losses, clips)


def surplus_slips_in(rows: Arrays, person: npt.NDArray[np.int64], slot: Slot) -> Arrays:
    """Rows beyond a slot begin another one, as if they were somebody else's."""
    place = np.array([int((person[:i] == who).sum()) for i, who in enumerate(person)])
    _, again = np.unique(person + place // slot.rows * (person.max() + 1), return_inverse=True)
    return grouped(rows, again, slot)


@contextmanager
def stepping(stepper: type[Stepper]) -> Iterator[None]:
    """`RecordLocal` with another way through its local steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_local, "Stepper", stepper)
        yield


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Remembering(nn.Module):
    """Keeps a running mean of its inputs, as some home-made normalisation layers do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        out: Tensor = self.layer(x - self.mean)
        return out


@dataclass
class Spy:
    """Where a peeking policy finds what it must not know: filled by a backend's or a loss's side."""

    seen: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Peeking:
    """C follows a raw value (a norm, a loss, an F1 score) that never passed the gate."""

    spy: Spy
    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def init(self, public: PublicFacts) -> State:
        return {"bound": 1.0}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"]))

    def observe(self, state: State, observed: Observation) -> State:
        return {"bound": 0.5 + abs(sum(self.spy.seen)) % 1} if self.spy.seen else state
