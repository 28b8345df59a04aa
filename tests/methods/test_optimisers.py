"""What a client's optimiser sees: noised gradients alone where steps are released, anything under a bound else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modicum.core.clips import Flat
from modicum.core.parts import ClientKit, Method
from modicum.core.setting import MethodSpec, Setting
from modicum.core.stack import Pool
from modicum.data.arrays import FederatedData
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal, RehearsedNoise
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Aqc, DpSgd, NbAfl, PacDp

RECORD_LEVEL = (PacDp(optimiser="adam", steps=2), DpSgd(optimiser="adam", steps=2), Aqc(optimiser="adam", steps=2))


class Deaf(RehearsedNoise):
    """A gate through which the same values come, whatever is sent."""

    def _noised(self, value: Tensor, std: float, *key: object) -> Tensor:
        return torch.linspace(-1.0, 1.0, value.numel(), dtype=value.dtype).view_as(value)


class Raw(RecordLocal):
    """The mutant: its optimiser is handed the sums before they have passed the gate."""

    def _noised_gradients(
        self, steppers: Sequence[Any], pool: Pool, theta: Tensor, kit: ClientKit, step: int
    ) -> Tensor:
        super()._noised_gradients(steppers, pool, theta, kit, step)
        batches = pool.batches([stepper.chosen(step) for stepper in steppers])
        clips = [Flat(stepper.decision.bound) for stepper in steppers]
        return kit.backend.clipped_sums(theta, batches, kit.training.losses, clips)[0]


@dataclass(frozen=True)
class RawPacDp:
    def build(self, setting: Setting) -> Method:
        return replace(RECORD_LEVEL[0].build(setting), mechanism=Raw(steps=2))


def models(method: MethodSpec) -> list[Tensor]:
    """The server's model after two rounds behind a deaf gate, from the records and from their mirror images."""
    found = []
    fed = Federation.from_dataset("digits", clients=3, budgets=4.0)
    for data in (fed.data, mirrored(fed.data)):
        run = Rehearsal(Experiment(federation=Federation(data, fed.budgets), method=method, rounds=2))
        run.gate = Deaf(0)
        list(run.rounds())
        found.append(run.model)
    return found


def mirrored(data: FederatedData) -> FederatedData:
    clients = [replace(c, train=replace(c.train, x=c.train.x.max() - c.train.x)) for c in data.clients]
    return replace(data, clients=tuple(clients))


@pytest.mark.parametrize("method", RECORD_LEVEL)
def test_adam_is_post_processing_at_record_level(method: MethodSpec) -> None:
    first, second = models(method)
    assert torch.equal(first, second)
    assert float(first.abs().max()) > 0


def test_an_optimiser_that_looks_behind_the_door_is_noticed() -> None:
    first, second = models(RawPacDp())
    assert not torch.equal(first, second)


def test_whatever_adam_does_an_update_keeps_its_bound() -> None:
    fed = Federation.from_dataset("digits", clients=3, budgets=float("inf"))
    spec = NbAfl(optimiser="adam", lr=10.0, clip=0.3, aggregation="mean")
    run = Rehearsal(Experiment(federation=fed, method=spec, rounds=1))
    _, jobs = run.begin()
    norms = [float(message.update.norm()) for message, _ in run.method.mechanism.run(jobs, run.kit)]
    assert norms == pytest.approx([0.3] * 3, rel=1e-5)
