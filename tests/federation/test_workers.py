"""One run in several processes: the same bits for any number of workers, also where one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from modicum.aggregation import Mean
from modicum.compute.client_batched.fused import FusedBackend
from modicum.core.messages import Message
from modicum.core.parts import ClientKit, Job, Method, State
from modicum.core.setting import MethodSpec, Setting
from modicum.errors import UserError
from modicum.federation import workers
from modicum.federation.experiment import Experiment
from modicum.federation.simulation import Simulation
from modicum.federation.worker import Bench, Results
from modicum.federation.workers import Workers
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Aqc, DpPfsd, DpSgd
from modicum.policies import Fixed
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.verify import verify
from tests.federation.golden import digests, play
from tests.rows import CLIENTS, Composed, StepQuantile, experiment

PERSONAL = DpPfsd(batch=4)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stacks of one client, so that four clients are shared out; and no process is left behind."""
    monkeypatch.setattr(workers, "STACK", 1)
    yield
    assert multiprocessing.active_children() == []


def run(method: MethodSpec, count: int, **named: Any) -> Experiment:
    return experiment(method, workers=count, rounds=named.pop("rounds", 3), **named)


def kill_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first worker that is given work dies over it, in the second round."""
    killed, hand_out, rounds = list[int](), Workers._hand_out, set[int]()

    def murderous(self: Workers, stacks: Sequence[Sequence[Job]], left: deque[int], turn: int) -> None:
        hand_out(self, stacks, left, turn)
        rounds.add(stacks[0][0].broadcast.round)
        if len(rounds) > 1 and not killed:
            victim = next(worker for worker in self._workers if worker.stack is not None)
            killed.append(victim.process.pid)
            os.kill(victim.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Workers, "_hand_out", murderous)
    return killed


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.heavy)])
def test_bits_depend_neither_on_the_number_of_workers_nor_on_kills(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that clients keep travel with their work; the ledger has the same entries in the same order."""
    alone = digests(play(run(PERSONAL, 1), tmp_path / "one"))
    assert verify(tmp_path / "one").matches
    killed = kill_once(monkeypatch)
    assert digests(play(run(PERSONAL, count), tmp_path / "killed")) == alone
    assert killed


def in_any_order(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Negative control: results are taken as they come, here the last stack's first."""
    compute, turned = Workers.compute, list[int]()

    def backwards(self: Workers, stacks: Sequence[Sequence[Job]]) -> Iterator[tuple[Sequence[Job], Results]]:
        done = list(compute(self, stacks))
        turned.extend(range(len(done) - 1))
        return iter(done[::-1])

    monkeypatch.setattr(Workers, "compute", backwards)
    return turned


def test_results_that_are_taken_as_they_come_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = digests(play(run(DpSgd(), 1), tmp_path / "right"))
    turned = in_any_order(monkeypatch)
    assert digests(play(run(DpSgd(), 1), tmp_path / "wrong"))["ledger"] != right["ledger"]
    assert turned


def test_an_interrupted_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    whole = digests(play(run(Aqc(batch=4), 1, rounds=2), tmp_path / "whole"))
    assert digests(play(run(Aqc(batch=4), 2, rounds=2), tmp_path / "stopped", interrupted=True)) == whole


def test_real_noise_is_drawn_by_workers_and_settled_here(tmp_path: Path) -> None:
    sim = Simulation(run(DpSgd(), 2), tmp_path / "run", noise=CryptoNoise())
    try:
        records = list(sim.rounds())
        assert [record.answered for record in records] == [CLIENTS] * 3
        assert sim.ledger.unsettled() == []
    finally:
        sim.close()


@dataclass(frozen=True, kw_only=True)
class Fails(RecordLocal):
    """Works until its second round."""

    how: str = "error"

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        if jobs[0].broadcast.round and self.how == "error":
            raise UserError("the second round does not come off")
        if jobs[0].broadcast.round:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(jobs, kit)


@dataclass(frozen=True)
class Failing:
    """A method whose mechanism fails."""

    how: str

    def build(self, setting: Setting) -> Method:
        method = DpSgd().build(setting)
        return replace(method, mechanism=Fails(how=self.how))


def test_what_a_worker_finds_wrong_is_said_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the second round does not come off"):
        play(run(Failing("error"), 2), tmp_path / "run")


def test_clients_that_kill_every_worker_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "DEATHS", 1)
    with pytest.raises(UserError, match="die over the same clients"):
        play(run(Failing("death"), 1), tmp_path / "run")


def test_what_cannot_be_handed_out_is_refused_before_anything_is_reserved(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Here(Fails):
        """Of this function: no other process can know it."""

    steps = Composed(StepQuantile(), RecordLocal(steps=2), Mean())
    refused = [
        (run(steps, 2), "decides before each step"),
        (experiment(DpSgd(), workers=2, compile=True), "leave out compile"),
        (run(Composed(Fixed(0.5), Here(), Mean()), 2), "cannot be sent to worker processes"),
    ]
    for i, (made, words) in enumerate(refused):
        with pytest.raises(UserError, match=words):
            Simulation(made, tmp_path / str(i))
        assert not (tmp_path / str(i) / "ledger.sqlite").exists()
    with pytest.raises(UserError, match="at least 1"):
        run(DpSgd(), 0)


def test_an_engine_judges_itself_by_rows_that_nobody_has(tmp_path: Path) -> None:
    """Whatever stack a worker sees first: its engine was proven before, the same in every process."""
    sim = Simulation(run(PERSONAL, 1), tmp_path / "run")
    sim.close()
    assert sim._workers is not None
    shop = sim._workers._workshop
    bench = Bench(shop, "cpu")
    assert isinstance(bench.kit.backend, FusedBackend)
    assert {kind for kind, _ in bench.kit.backend._proven} == {"gradients", "clipped sums"}
    untried = Bench(replace(shop, made_up=None), "cpu")
    assert isinstance(untried.kit.backend, FusedBackend)
    assert untried.kit.backend._proven == {}
