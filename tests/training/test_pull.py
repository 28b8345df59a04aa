"""Training that sees parameters: FedProx's pull before the clipping of updates, and after the noise of steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modicum.core.messages import Expected
from modicum.core.optimisers import Sgd
from modicum.core.parts import Asked, Backend, Batch, ClientKit, Mechanism, State
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed, DpFedAvg, FedProx
from modicum.training.local_steps import LocalSteps
from modicum.training.plain import Supervised
from modicum.training.proximal import Proximal
from tests.mechanisms.stage import OpenGate, Silent, Stage, double_model, loop, records
from tests.rows import CLIENTS, simulate
from tests.test_non_interference import interferes

LR, MU, STEPS, N = 0.5, 0.8, 3, 12
LEVELS: dict[str, Mechanism] = {
    "client": ClientLevel(local=LocalSteps(batch=N, steps=STEPS)),
    "record": RecordLocal(steps=STEPS),
}


@dataclass(frozen=True)
class Away(Supervised):
    """A pull that has nothing to do with the records and goes far."""

    def pull(self, theta: Tensor, start: Tensor) -> Tensor:
        return torch.full_like(theta, 1e3)


def update(mechanism: Mechanism, training: Supervised, bound: float = 1e6) -> tuple[Tensor, OpenGate]:
    backend, theta = loop(double_model("dense", 0))
    stage = Stage(mechanism, backend)
    job = stage.job("a", records(1, N), theta, Silent(0), bound=bound)
    (message, _), *_ = mechanism.run([job], replace(stage.kit(), training=training))
    assert isinstance(job.gate, OpenGate)
    return message.update, job.gate


def by_hand() -> Tensor:
    """Gradient descent on F(θ) + μ/2·‖θ − θ₀‖² over all records."""
    backend, first = loop(double_model("dense", 0))
    theta = first.clone()[None]
    for _ in range(STEPS):
        gradient = backend.gradients(theta, [records(1, N)], Supervised().losses)
        theta = theta - LR * (gradient + MU * (theta - first))
    return theta[0] - first


@pytest.mark.parametrize("mechanism", LEVELS.values(), ids=LEVELS)
def test_is_the_proximal_objective(mechanism: Mechanism) -> None:
    """Where the bound does not bind and noise is silent, both levels descend on the same objective."""
    pulled, _ = update(mechanism, Proximal(Sgd(LR), MU))
    plain, _ = update(mechanism, Supervised(Sgd(LR)))
    torch.testing.assert_close(pulled, by_hand(), rtol=1e-5, atol=1e-8)
    assert pulled.norm() < plain.norm()


def test_a_pull_is_clipped_with_the_update() -> None:
    mechanism = LEVELS["client"]
    sent, gate = update(mechanism, Away(Sgd(LR)), bound=0.5)
    assert gate.private[0][2]["update"].norm() <= 0.5
    assert sent.norm() <= 0.5


def test_at_record_level_no_pull_enters_what_is_charged() -> None:
    """What goes to the gate is the clipped sum alone: the pull is added to what comes out."""
    (plain, before), (far, after) = (update(LEVELS["record"], t(Sgd(LR)), bound=0.5) for t in (Supervised, Away))
    assert torch.equal(before.private[0][2]["gradient"], after.private[0][2]["gradient"])
    assert all(sums["gradient"].norm() <= 0.5 * N for _, _, sums in after.private)
    assert (far - plain).norm() > 1e3


def test_how_far_a_pull_reaches_is_not_held_against_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Composed(training=Away(Sgd(LR)))
    run = simulate(spec, tmp_path / "a", rounds=1)
    assert not run.step().impossible
    run.close()
    real = RecordLocal.expected

    def unaware(mechanism: RecordLocal, asked: Asked, kit: ClientKit) -> Expected:
        return real(mechanism, asked, replace(kit, training=Supervised(Sgd(LR))))

    monkeypatch.setattr(RecordLocal, "expected", unaware)  # the mutant: honest clients count as absent
    run = simulate(spec, tmp_path / "b", rounds=1)
    assert len(run.step().impossible) == CLIENTS
    run.close()


@dataclass(frozen=True)
class Peeking(Supervised):
    """ProximalTerm towards the mean of the client's own records: the mutant that non-interference catches."""

    seen: dict[str, Any] = field(default_factory=dict, compare=False)

    def targets(self, records: Batch, state: State, backend: Backend) -> dict[str, Tensor]:
        self.seen["mean"] = records.x.mean()
        return super().targets(records, state, backend)

    def pull(self, theta: Tensor, start: Tensor) -> Tensor:
        return self.seen["mean"].expand_as(theta)


def test_a_pull_of_parameters_shows_nothing_of_records(tmp_path: Path) -> None:
    assert not interferes(Composed(training=Proximal(Sgd(0.3), 1.0)), tmp_path / "sound")
    assert interferes(Composed(training=Peeking(Sgd(0.3))), tmp_path / "broken")


def test_without_weight_it_is_dp_fedavg(tmp_path: Path) -> None:
    models = []
    for name, spec in (("prox", FedProx(batch=4, mu=0.0)), ("avg", DpFedAvg(batch=4)), ("far", FedProx(mu=1.0))):
        run = simulate(spec, tmp_path / name)
        list(run.rounds())
        run.close()
        models.append(run.model)
    torch.testing.assert_close(models[0], models[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(models[0], models[2], rtol=1e-3)


def test_bad_weights() -> None:
    for mu in (-1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="proximal weight"):
            Proximal(mu=mu)
