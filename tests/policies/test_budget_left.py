"""A policy sees what is left of each plan or filter: public, equal in simulation and rehearsal, and no ε."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.needs import Need
from modicum.core.parts import Mechanism, Observation, Place, Scope, State
from modicum.core.release_gate import ReservedGate
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.simulation import Simulation
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed, FedAvg
from modicum.privacy.events import Release
from modicum.privacy.ledger import Ledger
from tests.rows import MECHANISMS, ROUNDS, experiment, simulate
from tests.test_non_interference import interferes


@dataclass(frozen=True)
class Frugal:
    """The bound goes down with what a client has left."""

    scope, place, signals = Scope.ROUND, Place.SERVER, ()

    def init(self, public: PublicFacts) -> State:
        return {"left": {c.name: 1.0 for c in public.clients}, "seen": []}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return {name: Decision(0.1 + 0.4 * state["left"][name]) for name in clients}

    def observe(self, state: State, observed: Observation) -> State:
        return {"left": dict(observed.left), "seen": [*state["seen"], dict(observed.left)]}


@dataclass(frozen=True)
class FrugalNoise(Frugal):
    """Chooses its noise as well, in front of a filter."""

    needs = (Need.ADAPTIVE_NOISE,)

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return {name: Decision(0.5, 20.0 / max(state["left"][name], 0.5)) for name in clients}


PLANNED = ["record-poisson", "client-local", "client-central-secret"]
FILTER = RecordLocal(adaptive=True)


def seen(run: Simulation) -> list[dict[str, float]]:
    list(run.rounds())
    run.close()
    found: list[dict[str, float]] = run.server.state.policy["seen"]
    return found


@pytest.mark.parametrize("name", PLANNED)
def test_of_a_plan(name: str, tmp_path: Path) -> None:
    spec = Composed(Frugal(), MECHANISMS[name])
    shares = seen(simulate(spec, tmp_path, metrics=()))
    expected = [1 - (t + 1) / ROUNDS for t in range(ROUNDS)]
    for client in shares[0]:
        assert [share[client] for share in shares] == pytest.approx(expected)
    rehearsal = Rehearsal(experiment(spec, metrics=()))
    list(rehearsal.rounds())
    assert rehearsal.server.state.policy["seen"] == shares


def test_of_a_filter_is_a_share_of_its_cap(tmp_path: Path) -> None:
    spec = Composed(FrugalNoise(), FILTER)
    shares = seen(simulate(spec, tmp_path, metrics=()))
    ends = shares[-1]
    assert all(0 <= share < 1 for share in ends.values())
    assert ends["client-00"] < ends["client-03"]  # budgets of 1 and 8 under equal noise
    for client in ends:
        of_one = [share[client] for share in shares]
        assert of_one == sorted(of_one, reverse=True)


def test_without_a_budget_all_is_left(tmp_path: Path) -> None:
    run = simulate(FedAvg(batch=4), tmp_path)
    run.step()
    assert set(run.ledger.left().values()) == {1.0}
    run.close()


def test_a_resumed_run_sees_the_same(tmp_path: Path) -> None:
    spec = Composed(Frugal(), MECHANISMS["record-poisson"])
    whole = simulate(spec, tmp_path / "whole")
    stopped = simulate(spec, tmp_path / "stopped")
    stopped.step()
    stopped.close()
    resumed = simulate(spec, tmp_path / "stopped")
    assert seen(resumed) == seen(whole)
    assert torch.equal(resumed.model, whole.model)


@pytest.mark.parametrize("mechanism", [*(MECHANISMS[name] for name in PLANNED), FILTER], ids=[*PLANNED, "filter"])
def test_is_a_function_of_public_values(mechanism: Mechanism, tmp_path: Path) -> None:
    policy = FrugalNoise() if mechanism is FILTER else Frugal()
    assert not interferes(Composed(policy, mechanism), tmp_path)


def test_a_realised_spend_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a share by the records that were drawn in the end, which secret coins decide."""
    drawn: dict[str, int] = {}
    sample = ReservedGate.sample

    def counting(self: ReservedGate, release: Release, step: int, records: int, *more: Tensor | None) -> Tensor:
        rows = sample(self, release, step, records, *more)
        drawn[release.client] = drawn.get(release.client, 0) + len(rows)
        return rows

    monkeypatch.setattr(ReservedGate, "sample", counting)
    monkeypatch.setattr(Ledger, "left", lambda self: {c: 1 / (1 + drawn.get(c, 0)) for c in self.plans})
    assert interferes(Composed(Frugal(), MECHANISMS["record-poisson"]), tmp_path)
