"""What is taught on public records is a function of them alone, and so is what a run with it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modicum.core.setting import MethodSpec
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.garbage import loud
from modicum.methods import AcdpPfsd, FedMap
from modicum.papers.acdp_pfsd.pretrain import teach
from modicum.papers.fedmap.fit import Schedule, fit_metanet
from tests.rows import arrays, experiment, federation, simulate
from tests.test_non_interference import interferes

PPO = AcdpPfsd(batch=4, memory=2, passes=2, sample=2, agent_lr=0.05)
MAP = FedMap(batch=4, steps=2, lr=0.1, kinds=(0.7, 1.4))


def agent(made: Experiment, path: Path) -> MethodSpec:
    teach(made, 1, 1, path)
    return replace(PPO, agent=str(path))


def network(made: Experiment, path: Path) -> MethodSpec:
    fit_metanet(made, Schedule(runs=1, held_out=1, passes=1, epochs=2, lr=0.05), path)
    return replace(MAP, network=str(path))


def with_public_records(own: Federation, seed: int = 0) -> Federation:
    """More of them than the rows have: a stand-in is a part of a part."""
    rng = np.random.default_rng(seed)
    return replace(own, data=replace(own.data, proxy=arrays(rng, 90), proxy_validation=arrays(rng, 30)))


@pytest.mark.parametrize(("method", "taught"), [(PPO, agent), (MAP, network)])
def test_public_records_alone_decide_it(
    method: MethodSpec, taught: Callable[[Experiment, Path], MethodSpec], tmp_path: Path
) -> None:
    made, usual = [], federation()
    owns = with_public_records(usual), with_public_records(loud(usual, 7)), with_public_records(usual, 1)
    for k, own in enumerate(owns):
        taught(experiment(method, federation=own, metrics=()), tmp_path / f"{k}")
        made.append((tmp_path / f"{k}").read_bytes())
    assert made[0] == made[1]
    assert made[0] != made[2]


@pytest.mark.parametrize(("method", "taught"), [(PPO, agent), (MAP, network)])
def test_a_run_with_it_shows_nothing_else_and_spends_what_is_planned(
    method: MethodSpec, taught: Callable[[Experiment, Path], MethodSpec], tmp_path: Path
) -> None:
    spec = taught(
        experiment(method, federation=with_public_records(federation()), metrics=()), tmp_path / "taught"
    )
    assert spec != method
    assert not interferes(spec, tmp_path / "again")
    run = simulate(spec, tmp_path / "run")
    list(run.rounds())
    for name, plan in run.plans.items():
        assert 0 < run.ledger.reported(name) <= plan.budget * (1 + 1e-9)
