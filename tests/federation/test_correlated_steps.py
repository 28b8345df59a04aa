"""Noise that a client correlates over its own local steps: batches in turn, what is added, keys, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from torch import Tensor

import modicum as mo
from modicum.core.release_gate import ReleaseGate, SumGate, batch_of, rows_of
from modicum.core.setting import MethodSpec
from modicum.errors import UserError
from modicum.federation.correlate import gain_lines
from modicum.federation.experiment import Experiment, Federation, build_method
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.setup import set_up
from modicum.federation.simulation import Simulation
from modicum.methods import Aqc, DpFedAvg, DpSgd
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Cyclic, Release
from modicum.privacy.factors import IDENTITY
from modicum.privacy.ledger.budgets import Refused
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
from modicum.privacy.noise.keyed import KeyedNoise, open_key
from modicum.privacy.verify import verify

STEPS = DpSgd(batch=20, epochs=1.0, clip=0.5, lr=0.1)


def experiment(method: MethodSpec = STEPS, **settings: Any) -> Experiment:
    federation = Federation.from_dataset("digits", clients=10, partition="iid", budgets=[2.0, 8.0])
    given: dict[str, Any] = {"rounds": 4, "seed": 7, "noise": "correlated", **settings}
    return Experiment(federation=federation, method=method, **given)


class Watched:
    """Notes what each client's gate is given, and what it gives."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[Release, int, Tensor, Tensor]]] = {}

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        return _Noted(gate, self)  # type: ignore[return-value]

    def server(self, gate: SumGate) -> SumGate:
        return gate

    def noise(self, name: str) -> np.ndarray:
        """What was added in each step, in units of a row of z."""
        return np.stack([((out - sums) / r.blocks[0].noise_std).numpy() for r, _, sums, out in self.seen[name]])


class _Noted:
    def __init__(self, gate: ReleaseGate, watched: Watched) -> None:
        self._gate, self._watched = gate, watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gate, name)

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = {name: value.double().clone() for name, value in sums.items()}
        out = self._gate.release(release, step, sums)
        name = release.blocks[0].name
        self._watched.seen.setdefault(release.client, []).append((release, step, given[name], out[name].double()))
        return out


def played(run: Simulation) -> Simulation:
    for _ in run.rounds():
        pass
    return run


@pytest.mark.parametrize(("records", "batches"), [(100, 5), (103, 7), (9, 9), (40, 3)])
def test_every_record_is_in_one_batch_of_a_pass_always_the_same(records: int, batches: int) -> None:
    sampler = Cyclic(batches)
    for start in (0, batches, 5 * batches):
        turn = [batch_of(start + t, sampler, records).tolist() for t in range(batches)]
        assert sorted(itertools.chain(*turn)) == list(range(records))
        assert turn == [batch_of(t, sampler, records).tolist() for t in range(batches)]
        assert max(map(len, turn)) - min(map(len, turn)) <= 1


@pytest.mark.parametrize("settings", [{}, {"bands": 3}, {"factor": "blt"}, {"bands": 1}])
def test_what_is_added_is_the_factor_s_inverse_times_fresh_rows(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Over all steps of all rounds, whatever round they are in."""
    watch = Watched()
    run = played(Simulation(experiment(**settings), tmp_path / "run", watch=watch))
    for name in ("client-00", "client-05"):
        terms = run.plans[name].correlation("gradient")
        assert terms is not None
        assert terms.steps == run.plans[name].releases[0].count
        added = watch.noise(name)
        assert len(added) == terms.steps
        whole = np.tril(toeplitz(terms.factor.column(terms.steps)))
        rows = rows_of(SimulatedNoise(7), name, replace(terms, factor=IDENTITY))
        like = torch.zeros(added.shape[1])
        fresh = np.stack([rows.row("gradient", t, like).numpy() for t in range(terms.steps)])
        assert whole @ added == pytest.approx(fresh, abs=5e-4)
        numbers = [r.first_row + step - r.step for r, step, _, _ in watch.seen[name]]
        assert numbers == list(range(terms.steps))
    run.close()


def test_a_run_verifies_and_its_certificate_names_the_factor(tmp_path: Path) -> None:
    run = mo.train(
        experiment().federation,
        method=STEPS,
        rounds=4,
        noise=mo.Noise("correlated", bands=4),
        folder=tmp_path / "run",
    )
    assert verify(tmp_path / "run").matches
    line = Certificate.read(tmp_path / "run" / "certificate.json").clients["client-00"]
    assert line.correlated is not None
    said = line.correlated["gradient"]
    assert (said["separation"], said["participations"]) == (7, 4)
    assert line.epsilon <= 2.0
    assert run.certificate.epsilon("client-01") <= 8.0


@pytest.mark.parametrize(("batch", "mixed"), [(20, [True, False, True]), (400, [False] * 3)])
def test_no_privacy_and_batches_of_all_records_play_along(tmp_path: Path, batch: int, mixed: list[bool]) -> None:
    """Nothing is claimed for one client; where a batch is all that there is, noise is fresh in each step."""
    federation = Federation.from_dataset("digits", clients=3, partition="iid", budgets=[2.0, float("inf"), 4.0])
    method = DpSgd(batch=batch, epochs=2.0, lr=0.1)
    made = Experiment(federation=federation, method=method, rounds=2, noise="correlated")
    run = played(Simulation(made, tmp_path / "run"))
    run.close()
    assert [plan.correlation("gradient") is not None for plan in run.plans.values()] == mixed


def test_adaptive_bounds_are_in_units_of_the_bound(tmp_path: Path) -> None:
    run = played(Simulation(experiment(Aqc(level="record", batch=20, lr=0.1)), tmp_path / "run"))
    Certificate.from_ledger(run.ledger).write(tmp_path / "run" / "certificate.json")
    bounds = {block.bound for e in run.ledger.charges() for block in e.blocks if block.name == "gradient"}
    run.close()
    assert len(bounds) > 3
    assert verify(tmp_path / "run").matches


def test_a_rehearsal_has_the_same_rows(tmp_path: Path) -> None:
    run = played(Simulation(experiment(), tmp_path / "run"))
    run.close()
    rehearsal = Rehearsal(experiment())
    assert len(list(rehearsal.rounds())) == 4
    assert torch.allclose(rehearsal.server.state.model, run.server.state.model, atol=1e-4)


@pytest.mark.heavy
def test_workers_have_the_same_rows(tmp_path: Path) -> None:
    ends = []
    for workers in (1, 2):
        run = played(Simulation(experiment(workers=workers), tmp_path / str(workers)))
        ends.append(run.server.state.model.clone())
        run.close()
    alone = played(Simulation(experiment(), tmp_path / "alone"))
    alone.close()
    assert torch.equal(ends[0], ends[1])
    assert torch.allclose(ends[0], alone.server.state.model, atol=1e-5)


def test_rows_are_taken_one_after_another(tmp_path: Path) -> None:
    run = Simulation(experiment(), tmp_path / "run")
    run.step()
    last = [e for e in run.ledger.charges() if e.client == "client-00"][-1]
    due = last.first_row + last.count
    for first in (0, last.first_row, due - 1, due + 1):
        with pytest.raises(Refused, match="too-early"):
            run.ledger.reserve([replace(last, round=1, first=first)])
    with pytest.raises(Refused, match="plan-exhausted"):
        run.ledger.reserve([replace(last, round=1, first=due, count=10_000)])
    run.ledger.reserve([replace(last, round=1, first=due)])
    run.close()


@pytest.mark.parametrize("stops", range(1, 4))
def test_cryptographic_rows_go_on_after_a_restart(tmp_path: Path, stops: int) -> None:
    pytest.importorskip("cryptography")
    folder, watch = tmp_path / "run", Watched()
    run = Simulation(experiment(), folder, noise=CryptoNoise(), watch=watch)
    for _ in range(stops):
        run.step()
    secret = open_key(folder / "noise.key", begun=True)
    run.close()
    run = played(Simulation(experiment(), folder, noise=CryptoNoise(), watch=watch))
    terms = run.plans["client-03"].correlation("gradient")
    assert terms is not None
    rows, added = rows_of(KeyedNoise(secret), "client-03", terms), watch.noise("client-03")
    assert len(added) == terms.steps
    for t in range(terms.steps):
        assert added[t] == pytest.approx(rows.row("gradient", t, torch.zeros(added.shape[1])).numpy(), abs=5e-4)
    assert not (folder / "noise.key").exists()
    run.close()


def test_a_run_that_ends_early_destroys_its_key(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "run"
    run = Simulation(experiment(), folder, noise=CryptoNoise())
    run.step()
    run.end()
    run.close()
    assert not (folder / "noise.key").exists()
    with pytest.raises(UserError, match="begin a new run"):
        Simulation(experiment(), folder, noise=CryptoNoise())


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (DpSgd(lr=0.1), "every record is in every step"),
        (DpSgd(batch=20, lr=0.1, adjacency="add-remove"), "shift with a record"),
        (DpFedAvg(view="secure-aggregation", batch=20), "each client adds its own"),
    ],
)
def test_what_cannot_be_sound_is_refused_with_its_reason(method: MethodSpec, why: str) -> None:
    with pytest.raises(UserError, match=why):
        build_method(experiment(method))


def test_a_key_stays_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(UserError, match="leave workers and ray out"):
        Simulation(experiment(workers=1), tmp_path / "run", noise=CryptoNoise())


def test_the_plan_says_what_is_gained() -> None:
    made = set_up(experiment(rounds=20), SimulatedNoise(0))
    (line,) = gain_lines(made.method, made.experiment.setting, None, made.facts)
    assert "batches in turn" in line
    assert "Poisson" in line
