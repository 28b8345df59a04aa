"""One run in several processes: the same bits for any number of workers, also where one of them is killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from modicum.aggregation import Mean
from modicum.compute.client_batched.fused import FusedBackend
from modicum.core.messages import Message
from modicum.core.parts import ClientKit, Job, Method, State
from modicum.core.setting import MethodSpec, Setting
from modicum.errors import UserError
from modicum.federation import processes, workers
from modicum.federation.experiment import Experiment
from modicum.federation.processes import Processes
from modicum.federation.simulation import Simulation
from modicum.federation.worker import Bench, Results, Seat, Task, Workshop, answer, serve
from modicum.federation.workers import Workers
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Aqc, DpPfsd, DpSgd
from modicum.policies import Fixed
from modicum.privacy.events import Release
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
    killed, give, rounds = list[int](), Processes.give, set[int]()

    def murderous(self: Processes, task: Task) -> None:
        give(self, task)
        rounds.add(task.round)
        if len(rounds) > 1 and not killed:
            victim = next(one for one in self._all.values() if one.stack is not None)
            killed.append(victim.process.pid)
            os.kill(victim.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Processes, "give", murderous)
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


class Twice:
    """Hands in this process. Whoever has stack 0 of the second round keeps everybody waiting; when it is given to
    another one, both answer, and the second answer has other bits: such as nobody can read."""

    made: ClassVar[list[Twice]] = []

    def __init__(self, workshop: Workshop, count: int, device: str) -> None:
        self.workshop, self.count = workshop, count
        self._bench, self._model = Bench(workshop, Seat(device, 1.0)), workshop.first
        self._given, self.twice = list[Task](), 0
        self.made.append(self)

    def begin(self, model: Tensor) -> None:
        self._model = model

    def give(self, task: Task) -> None:
        self._given.append(task)

    def wait(self, seconds: float) -> Sequence[tuple[int, bytes | None]]:
        slow = [task for task in self._given if self.count > 1 and (task.round, task.number) == (1, 0)]
        quick = [task for task in self._given if task not in slow]
        if quick:
            self._given = [task for task in self._given if task is not quick[0]]
            return [(quick[0].number, answer(self._bench, quick[0], self._model))]
        if len(slow) < 2:
            time.sleep(min(seconds, 0.01))
            return []
        self.twice += 1
        self._given = []
        return [(0, answer(self._bench, slow[1], self._model)), (0, b"other bits")]

    def drop(self) -> None:
        self._given = []

    def close(self) -> None:
        pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LATE", 0.2)
    monkeypatch.setattr(workers, "SLOW", 0.0)


@pytest.fixture
def answered_twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(workers, "Processes", Twice)
    monkeypatch.setattr(Twice, "made", [])
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("impatient", "answered_twice")
def test_clients_that_are_answered_twice_are_one_release(tmp_path: Path) -> None:
    """The first answer counts; the second is dropped before anybody reads it, though its bits differ."""
    once = digests(play(run(PERSONAL, 1), tmp_path / "once"))  # one at a time: nobody is free to be given it too
    assert digests(play(run(PERSONAL, 8), tmp_path / "twice")) == once
    assert [hands.twice for hands in Twice.made] == [0, 1]


@pytest.mark.usefixtures("impatient", "answered_twice")
def test_a_driver_that_reads_a_second_answer_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_all(self: Workers, out: workers.Out, turn: int) -> None:
        for number, blob in self._hands.wait(0.1 * (turn >= 0)):
            assert blob is not None
            out.copies[number] -= 1
            out.answered.add(number)
            out.done[number] = workers._read(blob, self._device)

    monkeypatch.setattr(Workers, "_collect", reads_all)
    monkeypatch.setattr(Workers, "_limit", 0.1)
    with pytest.raises(pickle.UnpicklingError):
        play(run(PERSONAL, 8), tmp_path / "run")


def stop_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first worker that is given work in the second round stands still until its stack is given to another."""
    stopped, give, had = list[int](), Processes.give, set[tuple[int, int]]()

    def halting(self: Processes, task: Task) -> None:
        give(self, task)
        if (task.round, task.number) in had and len(stopped) == 1:
            stopped.append(stopped[0])
            os.kill(stopped[0], signal.SIGCONT)
        had.add((task.round, task.number))
        if task.round == 1 and not stopped:
            stopped.append(next(one.process.pid for one in self._all.values() if one.stack == task.number))
            os.kill(stopped[0], signal.SIGSTOP)

    monkeypatch.setattr(Processes, "give", halting)
    return stopped


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("real", [False, True])
def test_a_worker_that_stands_still_costs_its_part_of_a_round(
    real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real noise both who compute the stack draw their own: one of the two is settled."""
    noise = CryptoNoise() if real else None
    whole, model = ended(Simulation(run(DpSgd(), 1), tmp_path / "whole", noise=noise))
    stopped = stop_once(monkeypatch)
    charges, theirs = ended(Simulation(run(DpSgd(), 2), tmp_path / "run", noise=noise))
    assert len(stopped) == 2
    assert len(set(charges)) == len(charges) == len(whole)
    assert real or torch.equal(model, theirs)


def ended(sim: Simulation) -> tuple[list[Release], Tensor]:
    """What is left of a run whose clients all answered and were all settled."""
    try:
        assert [record.answered for record in sim.rounds()] == [CLIENTS] * 3
        assert sim.ledger.unsettled() == []
        return list(sim.ledger.charges()), sim.model
    finally:
        sim.close()


def test_an_engine_judges_itself_by_rows_that_nobody_has(tmp_path: Path) -> None:
    """Whatever stack a worker sees first: its engine was proven before, the same in every process."""
    sim = Simulation(run(PERSONAL, 1), tmp_path / "run")
    sim.close()
    assert sim._workers is not None
    shop = sim._workers._hands.workshop
    bench = Bench(shop, Seat("cpu", 1.0))
    assert isinstance(bench.kit.backend, FusedBackend)
    assert {kind for kind, _ in bench.kit.backend._proven} == {"gradients", "clipped_sums"}
    untried = Bench(replace(shop, made_up=None), Seat("cpu", 1.0))
    assert isinstance(untried.kit.backend, FusedBackend)
    assert untried.kit.backend._proven == {}


def first_verdicts(shop: Workshop, tasks: Sequence[Task], model: Tensor) -> list[dict[Any, bool]]:
    """What engines hold of the model that each begin with another stack."""
    benches = [Bench(shop, Seat("cpu", 1.0)) for _ in tasks]
    for bench, task in zip(benches, tasks, strict=True):
        bench.results(pickle.loads(pickle.dumps(task)), model)  # as it travels
    backends = [bench.kit.backend for bench in benches]
    return [backend._proven for backend in backends if isinstance(backend, FusedBackend)]


def test_an_engine_that_judges_by_what_it_sees_judges_alike_in_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verdict here hangs on the numbers: without rows that nobody has, workers would come to differ."""
    monkeypatch.setattr(workers, "STACK", 2)
    monkeypatch.setattr(workers, "STACKS", 2)

    def capricious(self: FusedBackend, kind: str, _: Tensor, truth: Tensor) -> bool:
        verdict = len(seen) == 0 or bool(truth.double().sum() == seen[0])
        seen.append(truth.double().sum())
        self._proven[kind, self.model.training] = verdict
        return verdict

    seen = list[Tensor]()
    monkeypatch.setattr(FusedBackend, "_compare", capricious)
    sim = Simulation(run(PERSONAL, 1), tmp_path / "run")
    assert sim._workers is not None
    _, stacks = sim._rounds.begin()
    tasks = [sim._workers._task(i, stack) for i, stack in enumerate(stacks)]
    assert len(tasks) == 2
    shop, model = sim._workers._hands.workshop, tasks_model(stacks)
    sim.close()
    one, other = first_verdicts(shop, tasks, model)
    assert one == other
    seen.clear()
    one, other = first_verdicts(replace(shop, made_up=None), tasks, model)
    assert one != other


def tasks_model(stacks: Sequence[Sequence[Job]]) -> Tensor:
    return stacks[0][0].broadcast.model


class Idle:
    """A process that neither ends nor answers, unless it is told to."""

    def __init__(self, **_: Any) -> None:
        self.sentinel, self._held = os.pipe()

    def start(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def join(self, _: float = 0.0) -> None:
        os.close(self._held)
        os.close(self.sentinel)

    def is_alive(self) -> bool:
        return False


def test_processes_begin_for_work_and_none_begins_when_a_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C waits for nobody who has just been born."""
    sim = Simulation(run(DpSgd(), 3), tmp_path / "run")
    assert sim._workers is not None
    hands, begun = sim._workers._hands, list[Idle]()
    assert isinstance(hands, Processes)

    def begin(**named: Any) -> Idle:
        begun.append(Idle(**named))
        return begun[-1]

    monkeypatch.setattr(processes.processes.get_context("spawn"), "Process", begin)
    rounds = sim._rounds.begin()
    working = sim._workers.compute(rounds[1][:2])
    hands.begin(tasks_model(rounds[1]))
    monkeypatch.setattr(Processes, "wait", lambda self, seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        next(iter(working))
    assert len(begun) == 2
    assert hands._all == {}
    sim.close()
    assert len(begun) == 2


def test_a_worker_whose_driver_was_killed_ends_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(run(DpSgd(), 1), tmp_path / "run")
    assert sim._workers is not None
    _, stacks = sim._rounds.begin()
    task, shop = sim._workers._task(0, stacks[0]), sim._workers._hands.workshop
    sim.close()
    threads, tried = torch.get_num_threads(), list[int]()

    class Broken:
        def recv(self) -> Task:
            return task

        def send_bytes(self, blob: bytes) -> None:
            tried.append(len(blob))
            raise BrokenPipeError

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    serve(shop, tasks_model(stacks), Broken(), Seat("cpu", 1.0))  # type: ignore[arg-type]
    torch.set_num_threads(threads)
    assert len(tried) == 1


def test_a_container_with_little_shared_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(Tensor, "share_memory_", full)
    with pytest.raises(UserError, match="--shm-size"):
        Simulation(run(DpSgd(), 2), tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


@pytest.mark.parametrize(("clients", "stacks"), [(4, 4), (20, 10), (160, 16), (10_000, 313)])
def test_few_clients_are_shared_out_too(clients: int, stacks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By how many they are, and never by how many workers there are."""
    monkeypatch.setattr(workers, "STACK", 32)
    assert -(-clients // workers.in_a_stack(clients, 1000)) == stacks
    assert workers.in_a_stack(clients, 1) == 1
