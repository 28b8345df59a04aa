"""Runs with correlated noise: who comes when, what is added, and what is refused."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from torch import Tensor, nn

import modicum as mo
from modicum.core.release_gate import rows_of
from modicum.core.setting import MethodSpec
from modicum.errors import UserError
from modicum.federation.cohort import Rotation
from modicum.federation.correlate import gain_lines, participation
from modicum.federation.experiment import Experiment, Federation, build_method
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.setup import set_up
from modicum.federation.simulation import Simulation
from modicum.methods import Aqc, DpFedAvg, DpSgd
from modicum.privacy.certificate import Certificate
from modicum.privacy.noise import CryptoNoise, NoiseKey, SimulatedNoise
from modicum.privacy.noise.keyed import KeyedNoise
from modicum.privacy.noise.one_place import OnePlace
from modicum.privacy.verify import verify

TRUSTED = DpFedAvg(view="trusted-server", batch=20, clip=0.5)


def experiment(method: MethodSpec = TRUSTED, **settings: Any) -> Experiment:
    federation = Federation.from_dataset("digits", clients=10, partition="iid", budgets=[2.0, 8.0])
    given: dict[str, Any] = {"rounds": 12, "per_round": 2, "seed": 7, "noise": "correlated", **settings}
    return Experiment(federation=federation, method=method, **given)


@pytest.mark.parametrize(
    ("clients", "rounds", "per_round"), [(10, 12, 2), (10, 31, 3), (7, 20, 7), (5, 9, 1), (9, 2, 4), (11, 40, 6)]
)
def test_a_rotation_keeps_its_distance_and_treats_all_alike(clients: int, rounds: int, per_round: int) -> None:
    cohorts = Rotation(clients, rounds, per_round, seed=3)
    seen = {c: [t for t in range(rounds) if c in cohorts.invited(t)] for c in range(clients)}
    assert all(len(set(cohorts.invited(t))) == per_round for t in range(rounds))
    assert {c: cohorts.rounds_of(c) for c in range(clients)} == {c: tuple(ts) for c, ts in seen.items()}
    gaps = [b - a for ts in seen.values() for a, b in itertools.pairwise(ts)]
    assert min(gaps, default=cohorts.separation) >= cohorts.separation
    assert max(len(ts) for ts in seen.values()) == cohorts.most
    assert min(len(ts) for ts in seen.values()) >= cohorts.most - 1
    participation(cohorts)  # there is room for as many


def models(run: Simulation) -> list[Tensor]:
    """The shared model before each round and after the last."""
    return [run.server.state.model.clone(), *(run.server.state.model.clone() for _ in run.rounds())]


def silent(round: int, client: str) -> bool:  # noqa: ARG001
    return True


def noise_of(before: list[Tensor], run: Simulation) -> np.ndarray:
    """What was added in each round where nobody answered, in units of a row."""
    rows = np.diff(torch.stack(before).double().numpy(), axis=0) * run.cohorts.size
    name = run.facts[0].name
    return rows / (run.plans[name].releases[0].row_multiplier * bound_of(run, name))


def bound_of(run: Simulation, name: str) -> float:
    decisions = run.method.mechanism.decisions(
        run.method.policy.decide(run.server.state.policy, 0, run.server.names), run.kit.public.multipliers
    )
    return decisions[name].bound


@pytest.mark.parametrize("settings", [{}, {"bands": 3}, {"factor": "blt"}, {"bands": 1}])
def test_what_is_added_is_the_factor_s_inverse_times_fresh_rows(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = Simulation(experiment(**settings), tmp_path / "run", faults=silent)
    added = noise_of(models(run), run)
    schedule = run.method.mechanism.correlated
    assert (schedule.steps, schedule.separation) == (12, 5)
    whole = np.tril(toeplitz(schedule.factor.column(12)))
    source, size = SimulatedNoise(7), added.shape[1]
    fresh = np.stack(
        [source.normal(NoiseKey("(server)", t, 0, "row:update"), size, dtype="float32") for t in range(12)]
    )
    assert whole @ added == pytest.approx(fresh, abs=2e-4)
    run.close()


def test_noise_in_the_model_is_less_than_with_independent_rows(tmp_path: Path) -> None:
    ends = {}
    for name, settings in {"correlated": {}, "independent": {"bands": 1}}.items():
        run = Simulation(experiment(rounds=40, **settings), tmp_path / name, faults=silent)
        moved = models(run)
        ends[name] = float((moved[-1] - moved[0]).norm())
        run.close()
    assert ends["independent"] / ends["correlated"] == pytest.approx(2.0, rel=0.25)


def test_a_run_verifies_and_its_certificate_names_the_factor(tmp_path: Path) -> None:
    run = mo.train(
        experiment().federation,
        method=TRUSTED,
        rounds=12,
        cohorts=mo.Cohorts(per_round=2),
        noise=mo.Noise("correlated", bands=4),
        folder=tmp_path / "run",
    )
    assert verify(tmp_path / "run").matches
    line = Certificate.read(tmp_path / "run" / "certificate.json").clients["client-00"]
    assert line.correlated is not None
    assert line.correlated["update"]["separation"] == 5
    assert line.epsilon <= 2.0
    assert "bands = 4" in (tmp_path / "run" / "config.toml").read_text()
    assert run.certificate.epsilon("client-01") <= 8.0


def test_adaptive_bounds_are_in_units_of_the_bound(tmp_path: Path) -> None:
    method = Aqc(level="client", view="trusted-server", batch=20)
    run = Simulation(experiment(method), tmp_path / "run")
    for _ in run.rounds():
        pass
    Certificate.from_ledger(run.ledger).write(tmp_path / "run" / "certificate.json")
    bounds = {block.bound for e in run.ledger.charges() for block in e.blocks if block.name == "update"}
    run.close()
    assert len(bounds) > 10
    assert verify(tmp_path / "run").matches


def test_cryptographic_rows_go_on_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "run"
    run = Simulation(experiment(), folder, noise=CryptoNoise(), faults=silent)
    found = [run.server.state.model.clone()]
    for _ in range(5):
        run.step()
        found.append(run.server.state.model.clone())
    secret = (folder / "noise.key").read_bytes()
    run.close()
    run = Simulation(experiment(), folder, noise=CryptoNoise(), faults=silent)
    found += models(run)[1:]
    rows = rows_of(KeyedNoise(secret), "(server)", run.method.mechanism.correlated.terms(1))
    added = noise_of(found, run)
    for t in range(12):
        assert added[t] == pytest.approx(rows.row("update", t, found[0]).numpy(), abs=2e-4)
    assert not (folder / "noise.key").exists()
    run.close()


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


@pytest.mark.parametrize("method", [TRUSTED, DpSgd(batch=8, steps=2)], ids=["rounds", "steps"])
@pytest.mark.parametrize("way", ["copy", "older state", "negative control"])
def test_rows_are_drawn_in_one_place(
    tmp_path: Path, way: str, method: MethodSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's draws are others when a round is played again: models under one noise tell their difference."""
    if way == "negative control":
        monkeypatch.setattr(OnePlace, "check", lambda *_: None)
    folder, other = tmp_path / "run", tmp_path / "other"

    def opened(where: Path) -> Simulation:
        whole = experiment(method, model=dropping(), **({} if method is TRUSTED else {"per_round": None}))
        return Simulation(whole, where, noise=CryptoNoise())

    def round_of(where: Path) -> Tensor:
        run = opened(where)
        run.step()
        run.close()
        return run.model

    round_of(folder)
    shutil.copytree(folder, other)
    if way == "negative control":
        (other / "noise.home").write_text(str((other / "noise.key").stat().st_ino))
        moved = [round_of(where) for where in (folder, other)]
        assert 0 < (moved[0] - moved[1]).norm() < 0.2 * moved[0].norm()
        return
    first = round_of(folder)
    assert first.isfinite().all()
    if way == "older state":
        shutil.copytree(other, folder, dirs_exist_ok=True)
    with pytest.raises(UserError, match="put back from a backup"):
        opened(folder if way == "older state" else other)


def test_a_lost_key_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = Simulation(experiment(), folder, noise=CryptoNoise(), faults=silent)
    run.step()
    run.close()
    (folder / "noise.key").unlink()
    with pytest.raises(UserError, match="begin a new run"):
        Simulation(experiment(), folder, noise=CryptoNoise(), faults=silent)


def test_a_rehearsal_plays_it_too() -> None:
    rehearsal = Rehearsal(experiment())
    assert len(list(rehearsal.rounds())) == 12


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        (DpFedAvg(batch=20), {}, "each client adds its own"),  # behind secure aggregation
        (DpFedAvg(batch=20, view="server-sees-messages"), {}, "each client adds its own"),
        (DpFedAvg(batch=20, view="trusted-server", rate=0.5), {}, "leave rate out"),
        (TRUSTED, {"max_participations": 3}, "leave max_participations out"),
        (TRUSTED, {"bands": 6}, "separation"),
        (TRUSTED, {"bands": 3, "factor": "blt"}, "leave bands out"),
        (TRUSTED, {"noise": None, "bands": 3}, 'set noise = "correlated"'),
        (DpSgd(), {}, "gains nothing where every record is in every step"),
        (DpFedAvg(batch=20), {"secure_aggregation": "protocol"}, "masks"),
    ],
)
def test_what_cannot_be_sound_is_refused_with_its_reason(
    method: MethodSpec, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        build_method(experiment(method, **settings))


def said(**settings: Any) -> str:
    e = experiment(**settings)
    return " ".join(gain_lines(build_method(e), e.setting, e.max_participations))


def test_the_plan_says_what_is_gained_and_where_nothing_is() -> None:
    assert "Correlated noise (5 bands) leaves" in said()
    assert 'with noise = "correlated"' in said(noise="float")
    assert "gains nothing" in said(per_round=10)
    assert said(noise=None, method=DpFedAvg(batch=20)) == ""


@pytest.mark.parametrize(
    ("method", "settings", "chosen"),
    [
        (TRUSTED, {}, True),
        (TRUSTED, {"per_round": 5}, True),
        (TRUSTED, {"per_round": 6}, False),
        (TRUSTED, {"per_round": None}, False),
        (TRUSTED, {"noise": "float"}, False),
        (TRUSTED, {"max_participations": 3}, False),
        (DpFedAvg(view="trusted-server", noise_multiplier=3.0), {}, False),
        (DpFedAvg(view="trusted-server", rate=0.2), {"per_round": None}, False),
        (DpFedAvg(view="server-sees-messages"), {}, False),
    ],
)
def test_it_is_the_default_where_it_pays(method: MethodSpec, settings: dict[str, Any], chosen: bool) -> None:
    e = experiment(method, **{"noise": None, **settings})
    mechanism = build_method(e).mechanism
    assert (mechanism.correlated is not None) == chosen
    assert isinstance(set_up(e, SimulatedNoise(0)).cohorts, Rotation) == chosen
