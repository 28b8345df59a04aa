"""Record-level clipping assumes that a record's loss depends on that record alone: what says so must be so."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from modicum.aggregation import Mean
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.optimisers import Sgd
from modicum.core.parts import PERSONALISED, Batch, LocalTraining, Mechanism, Method
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.acdp_pfsd.distilled import Distilled
from modicum.policies import Fixed
from modicum.training.plain import Supervised

BACKEND = LoopBackend(nn.Linear(2, 3))
THETA = torch.linspace(-1, 1, BACKEND.layout.dimension)
X = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]])


@dataclass(frozen=True)
class ClaimsTooMuch(Distilled):
    """A negative control: the losses know all labels, and it says that they do not."""

    by_record = True


def losses_of_the_first(training: LocalTraining, others: list[int]) -> Tensor:
    records = Batch(X, {"y": torch.tensor([0, *others])})
    targets = training.targets(records, {PERSONALISED: THETA.flip(0)}, BACKEND)
    outputs = BACKEND.outputs(THETA, records.x)
    return training.losses(outputs, targets)[0]


def depends_on_others(training: LocalTraining) -> bool:
    return not torch.equal(losses_of_the_first(training, [1, 2]), losses_of_the_first(training, [0, 0]))


@pytest.mark.parametrize("training", [Supervised(), Distilled(), Distilled(alpha=1.0), Distilled(prior=1.0)])
def test_trainings_say_truly_whether_records_stand_alone(training: LocalTraining) -> None:
    assert training.by_record is not depends_on_others(training)


def test_the_mutant_is_caught() -> None:
    assert depends_on_others(ClaimsTooMuch(prior=1.0))


def method(mechanism: Mechanism, training: LocalTraining) -> Method:
    return Method(name="own", training=training, policy=Fixed(1.0), mechanism=mechanism, aggregation=Mean())


def test_record_level_mechanisms_refuse_what_mixes_records() -> None:
    mixing = Distilled(Sgd(0.1), prior=0.5)
    with pytest.raises(UserError, match="protects records, but"):
        method(RecordLocal(), mixing)
    method(ClientLevel(), mixing)
    method(RecordLocal(), Distilled(Sgd(0.1)))
