"""A step that cannot be computed: how many steps are in a message does not tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from modicum.core.messages import Decision
from modicum.core.parts import Method, Observation, State
from modicum.core.setting import Setting
from modicum.deploy.silo import taking_part as taking_part_module
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import METHODS, DpSgd
from tests.deploy.silo.helpers import EXPERIMENT, ledger_of, opened, write_silo
from tests.rows import StepQuantile

STEPS = 4


@dataclass(frozen=True)
class Follower(StepQuantile):
    """Each bound follows from the release before it, so that other noise leads to another bound."""

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"]))

    def observe(self, state: State, observed: Observation) -> State:
        assert isinstance(observed.opened, tuple)
        return {**state, "bound": 1.0 + 1e-3 * float(observed.opened[0].update[0])}


@dataclass(frozen=True, kw_only=True)
class Following:
    def build(self, setting: Setting) -> Method:
        return replace(
            DpSgd(lr=0.5).build(setting), mechanism=RecordLocal(batch=32, steps=STEPS), policy=Follower()
        )


def steps_sent(folder: Path, failing: int) -> int:
    """Steps that are settled with the message of a round in which this one fails."""
    text = EXPERIMENT.replace('name = "dp-sgd"\nclip = 0.5\nbatch = 32\nlr = 0.5\nsteps = 2', 'name = "following"')
    path = write_silo(folder, experiment=text)
    calls = iter(range(100))
    with pytest.MonkeyPatch.context() as patch, opened(path) as server:
        sums = taking_part_module.LoopBackend.clipped_sums

        def sometimes(*args: Any) -> Any:
            if next(calls) == failing:
                raise RuntimeError("a record that nobody can compute with")
            return sums(*args)

        patch.setattr(taking_part_module.LoopBackend, "clipped_sums", sometimes)
        assert server.join().refused is None
        assert server.propose(0).refused is None
    assert set(server.messages()) == {0}
    with ledger_of(path) as ledger:
        return ledger.releases_made("client-00") - len(ledger.unsettled())


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failed_step_does_not_shorten_the_round(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "following", Following)
    assert steps_sent(tmp_path / "sound", failing) == STEPS


def test_a_round_begun_again_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the failure gets out of the step, and the redone round stops where its noise differs."""
    monkeypatch.setitem(METHODS, "following", Following)
    monkeypatch.setattr(taking_part_module, "Careful", lambda backend: backend)
    assert 0 < steps_sent(tmp_path / "mutant", 2) < STEPS
