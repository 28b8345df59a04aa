"""A transform inside the client comes before the clipping, in every view, and never meets single records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modicum.core.messages import Message
from modicum.core.parts import ClientKit, Job, State
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.mechanisms import client_level
from modicum.mechanisms.client_level import ClientLevel
from modicum.methods import Composed
from modicum.policies import Fixed
from tests.mechanisms.stage import OpenGate, Silent, Stage, double_model, loop, records
from tests.rows import CLIENTS, LOCAL, MECHANISMS, simulate
from tests.test_non_interference import interferes

BOUND, KEPT = 0.3, 5
CLIENT = [name for name in MECHANISMS if name.startswith("client-")]


@dataclass(frozen=True)
class TopK:
    """Keeps the k largest coordinates of an update."""

    k: int = KEPT

    def apply(self, update: Tensor) -> Tensor:
        kept = torch.zeros_like(update)
        top = update.abs().topk(self.k).indices
        kept[top] = update[top]
        return kept


@dataclass(frozen=True)
class Shout:
    def apply(self, update: Tensor) -> Tensor:
        return update.mul_(1e6)


@dataclass(frozen=True)
class Shorten:
    def apply(self, update: Tensor) -> Tensor:
        return update[:-1]


def clipped(mechanism: ClientLevel) -> list[Tensor]:
    """What two clients' updates are when they reach the gate, or a trusted server."""
    backend, theta = loop(double_model("dense", 0))
    stage = Stage(mechanism, backend)
    jobs = [stage.job(name, records(i, 12), theta, Silent(0), bound=BOUND) for i, name in enumerate("ab")]
    messages = [message for message, _ in stage.run(jobs)]
    if not mechanism.view.senders_add_noise:
        return [message.update for message in messages]
    gates = [job.gate for job in jobs]
    return [sums["update"] for gate in gates if isinstance(gate, OpenGate) for _, _, sums in gate.private]


def of(name: str, transform: object) -> ClientLevel:
    mechanism = MECHANISMS[name]
    assert isinstance(mechanism, ClientLevel)
    return replace(mechanism, transform=transform)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CLIENT)
def test_is_applied_in_every_view_and_the_bound_holds_after_it(name: str) -> None:
    for update in clipped(of(name, TopK())):
        assert 0 < int((update != 0).sum()) <= KEPT
        assert update.norm() <= BOUND
    for update in clipped(of(name, Shout())):
        assert BOUND * 0.99 < update.norm() <= BOUND


def test_clipping_before_the_transform_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the bound was enforced on something else than what is released."""
    clip = client_level.clip_updates

    def late(updates: Tensor, bounds: Sequence[float]) -> Tensor:
        norms = clip(updates, bounds)
        updates.mul_(1e6)
        return norms

    monkeypatch.setattr(client_level, "clip_updates", late)
    assert all(update.norm() > BOUND for update in clipped(of("client-local", None)))


@dataclass(frozen=True, kw_only=True)
class Mixing(ClientLevel):
    """The negative control of "each client's update alone": all send what the first one has."""

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        done = super().run(jobs, kit)
        return [(replace(message, update=done[0][0].update), state) for message, state in done]


@pytest.mark.parametrize(
    ("mechanism", "alike"),
    [(ClientLevel(local=LOCAL), True), (Mixing(local=LOCAL), False)],
    ids=["ours", "mutant"],
)
def test_a_client_computes_the_same_alone_and_in_company(
    mechanism: ClientLevel, alike: bool, tmp_path: Path
) -> None:
    spec = Composed(Fixed(0.5), mechanism, transform=TopK())
    alone, together = simulate(spec, tmp_path / "a", rounds=1), simulate(spec, tmp_path / "b", rounds=1)
    alone.clients._at_once, together.clients._at_once = 1, CLIENTS
    for run in (alone, together):
        run.step()
        run.close()
    assert torch.allclose(alone.model, together.model, rtol=1e-4, atol=1e-5) == alike


def test_shows_nothing_of_records(tmp_path: Path) -> None:
    assert not interferes(Composed(mechanism=MECHANISMS["client-secure-aggregation"], transform=TopK()), tmp_path)


def test_without_privacy_it_is_applied_too(tmp_path: Path) -> None:
    run = simulate(Composed(mechanism=MECHANISMS["clear"], transform=TopK(1)), tmp_path, metrics=())
    first = run.model
    run.step()
    run.close()
    assert 0 < int((run.model != first).sum()) <= CLIENTS


def test_records_are_never_transformed() -> None:
    with pytest.raises(UserError, match="TopK transforms whole updates, which RecordLocal does not clip"):
        Composed(mechanism=MECHANISMS["record-whole"], transform=TopK()).build(Setting(4, 4, 2))


def test_a_transform_keeps_the_shape() -> None:
    with pytest.raises(UserError, match="Shorten changes the shape or precision"):
        clipped(of("client-local", Shorten()))
