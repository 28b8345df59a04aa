"""The benchmark times equal work only, and a row that fails does not stop it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from modicum.compute import Way
from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping.loop import LoopBackend
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.models import build
from modicum_bench import rounds, speed, steps
from modicum_bench.cohort import Cohort, records
from modicum_bench.steps import Step, disagreement, our_ways, ours, peers
from modicum_bench.timing import Timing, measure

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG")


def test_every_library_gives_the_same_clipped_sum() -> None:
    step = Step.make(build("cnn-small", (1, 12, 12), 10, seed=0), (1, 12, 12), 4, "cpu")
    truth = ours(step)()
    for name, peer in (*our_ways(step, [Way.AUTO, Way.EAGER]), *peers(step)):
        assert peer is not None, name
        assert disagreement(peer(), truth) < 1e-4, name


def test_a_wrong_sum_is_seen() -> None:
    truth = {"a": torch.ones(3), "b": torch.ones(2)}
    assert disagreement({"a": torch.ones(3), "b": 1.01 * torch.ones(2)}, truth) > 1e-3


def test_a_layout_is_judged_as_plain_training_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where plain training's gradient is off by 0.4%, a clipped sum may be by twice that, and nowhere else."""
    step = Step.make(build("cnn-small", (2, 12, 12), 10, seed=0), (2, 12, 12), 2, "cpu")
    assert steps.tolerances(step, 1e-4) == {"contiguous": 1e-4, "channels-last": 1e-4}
    plain = steps._plain_gradient

    def rounded(step: Step) -> dict[str, torch.Tensor]:
        last = step.x.is_contiguous(memory_format=torch.channels_last)
        return {name: g * (1.004 if last else 1) for name, g in plain(step).items()}

    monkeypatch.setattr(steps, "_plain_gradient", rounded)
    allowed = steps.tolerances(step, 1e-4)
    assert allowed == {"contiguous": 1e-4, "channels-last": pytest.approx(0.008, rel=1e-3)}
    assert allowed[steps.layout_of("ours, channels-last")] > allowed[steps.layout_of("torch.func")]


def test_a_round_is_the_same_for_both_engines() -> None:
    data = [records(20, (1, 4, 4), 10, i) for i in range(3)]
    mechanism = RecordLocal(batch=5, steps=2, noise_multiplier=1.0)
    updates = []
    for engine, at_once in ((FusedBackend, 3), (LoopBackend, 1)):
        model = build("mlp", (1, 4, 4), 10, seed=0)
        cohort = Cohort.make(model, engine(model), mechanism, data)
        jobs = cohort.reserve()
        results = cohort.run(jobs, at_once)
        cohort.settle(jobs, results)
        updates.append(torch.stack([message.update for message, _ in results]))  # type: ignore[union-attr]
    torch.testing.assert_close(updates[0], updates[1], rtol=1e-4, atol=1e-6)


def test_ways_are_timed_in_turns() -> None:
    order: list[str] = []
    times = measure({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, "cpu", repeats=3, warm_up=1)
    assert "".join(order) == "ab" * 4
    assert set(times) == {"a", "b"}


def test_a_timing_is_the_median_between_quartiles() -> None:
    found = Timing.of([0.001 * n for n in range(1, 10)], [0.002] * 9)
    assert found == Timing(median=5.0, low=3.0, high=7.0, best=1.0, processor=2.0)


def test_a_row_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> speed.Row:
        raise RuntimeError("no memory")

    fine = speed.Row("fine", ratio="a / b", value=1.0)
    monkeypatch.setattr(speed, "rows", lambda _: [("broken", broken), ("fine", lambda: fine)])
    threads = torch.get_num_threads()
    found = json.loads(speed.measure_all("cpu", threads=threads, out=tmp_path, as_json=True))
    assert [row["value"] for row in found["rows"]] == [None, 1.0]
    assert "no memory" in found["rows"][0]["notes"][0]
    assert json.loads((tmp_path / "speed-cpu.json").read_text()) == found


def test_bad_input_is_one_line() -> None:
    with pytest.raises(UserError, match="no row 'nothing' on cpu: use one of cnn"):
        speed.measure_all("cpu", only=["nothing"])


def test_a_round_written_out_is_what_peers_are_compared_with() -> None:
    work = rounds.Round(clients=3, steps=2, batch=4, bound=1e-3, rounds=4)
    moved = rounds.plain_round(work) - rounds.flat(rounds.first_model())
    assert 0 < float(torch.linalg.vector_norm(moved)) <= work.bound * (1 + 1e-5)


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_a_library_is_timed_only_if_its_round_agrees(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(work: rounds.Round) -> tuple[torch.Tensor, rounds.Laps]:
        laps = rounds.Laps()
        for _ in range(work.rounds):
            laps.lap()
        return rounds.plain_round(work) + off, laps

    monkeypatch.setattr(rounds, "LIBRARIES", {"one": ((), library), "other": (("no_such_package",), library)})
    found = list(rounds.peer_rounds(rounds.Round(clients=2, steps=1, rounds=5)))
    assert (found[0][1] is not None) is (off == 0.0)
    assert found[1] == ("other", None, "no_such_package is not installed")


@pytest.mark.parametrize("precision", speed.PRECISIONS)
def test_a_step_in_either_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def row() -> speed.Row:
        return speed.step_row("tiny", "cnn-small", (1, 12, 12), 4, "cpu", 1.0, compiled=False)

    monkeypatch.setattr(speed, "rows", lambda _: [("tiny", row)])
    threads = torch.get_num_threads()
    found = json.loads(speed.measure_all("cpu", threads=threads, precision=precision, as_json=True))
    assert found["machine"]["precision"] == precision
    times = found["rows"][0]["times"]
    assert all(times[f"ours, {layout}"] for layout in ("contiguous", "channels-last"))
    assert found["rows"][0]["value"] > 0
    with pytest.raises(UserError, match="no precision 'fp8'"):
        speed.measure_all("cpu", threads=threads + 1, precision="fp8")
    assert torch.get_num_threads() == threads


def test_rows_of_cohorts_time_both_kinds_of_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "WARM_UP", 1)
    found = speed.record_level_row("cpu", clients=2, steps=1, batch=8)
    assert {name for name, time in found.times.items() if time} == {
        "ours",
        "client by client",
        "client by client, replayed",
    }
    assert found.value is not None
    grid = speed.grid_row("cpu", configurations=2, steps=1, batch=8)
    assert grid.value is not None
    assert any("one run that is replayed" in note for note in grid.notes)
