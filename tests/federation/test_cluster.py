"""One run on a Ray cluster: the same bits as on this machine, also where a machine of it is killed in a round.

What needs `ray`, which is an extra, is skipped without it; refusals are tested everywhere.
"""

from __future__ import annotations

import os
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.config import differences, experiment_over, read, to_toml
from modicum.errors import MissingExtraError, UserError
from modicum.federation import cluster as clusters
from modicum.federation import workers
from modicum.federation.cluster import Cluster, connect
from modicum.federation.simulation import Simulation
from modicum.federation.worker import Task
from modicum.methods import DpPfsd, DpSgd
from modicum.privacy.verify import verify
from tests.docs import ROOT
from tests.federation.golden import digests, play
from tests.rows import CLIENTS, experiment

PERSONAL = DpPfsd(batch=4)


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STACK", 1)


@pytest.fixture
def three() -> Iterator[tuple[Any, Any]]:
    """A cluster of three nodes with a processor each, and one of them to be lost."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'modicum[ray]'")
    import ray
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    lost = nodes.add_node(num_cpus=1)
    path = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    ray.init(address=nodes.address, log_to_driver=False, runtime_env=path)
    yield nodes, lost
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.heavy
def test_a_machine_that_is_killed_in_a_round_costs_no_bit_and_nothing_twice(
    three: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients are computed again under the reservations that they had."""
    nodes, lost = three
    give, killed, rounds = Cluster.give, list[int](), set[int]()

    def murderous(self: Cluster, task: Task) -> None:
        give(self, task)
        rounds.add(task.round)
        if len(rounds) > 1 and len(self._out) > 2 and not killed:
            killed.append(task.round)
            nodes.remove_node(lost, allow_graceful=False)

    here = digests(play(experiment(PERSONAL, workers=1), tmp_path / "here"))
    monkeypatch.setattr(Cluster, "give", murderous)
    there = play(experiment(PERSONAL, ray=nodes.address), tmp_path / "there")
    assert killed == [1]
    assert digests(there) == here
    assert verify(tmp_path / "there").matches


@pytest.mark.heavy
def test_what_a_machine_finds_wrong_is_said_here(three: tuple[Any, Any], tmp_path: Path) -> None:
    nodes, _ = three
    with pytest.raises(UserError, match="the cluster has no GPU"):
        clusters._places(connect(nodes.address), None, "cuda")
    sim = Simulation(experiment(DpSgd(), ray=nodes.address, workers=2), tmp_path / "run")
    try:
        assert [record.answered for record in sim.rounds()] == [CLIENTS] * 4
    finally:
        sim.close()
    assert connect(nodes.address).is_initialized()  # the program was connected before: it stays so


def test_without_ray_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"modicum\[ray\]"):
        Simulation(experiment(DpSgd(), ray="auto"), tmp_path / "run")
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def nobody_there(address: str, **_: Any) -> None:
    raise ConnectionError(f"Could not find any running Ray instance at {address}.")


def test_an_address_at_which_nothing_answers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is reserved, and at once: Ray itself tries for a minute."""
    ray = types.SimpleNamespace(is_initialized=lambda: False, init=nobody_there)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for address, why in [
        (f"127.0.0.1:{port}", "refused"),
        ("somewhere", "not HOST:PORT"),
        ("auto", "Could not find any"),
    ]:
        with pytest.raises(UserError, match="no Ray cluster answers at") as said:
            Simulation(experiment(DpSgd(), ray=address), tmp_path / "run")
        assert why in str(said.value)
        assert "\n" not in str(said.value)
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_a_cluster_without_processors_is_refused() -> None:
    empty = types.SimpleNamespace(cluster_resources=lambda: {"memory": 1.0})
    with pytest.raises(UserError, match="the cluster has no CPU"):
        clusters._places(empty, None, "cpu")


def test_several_stacks_share_a_gpu() -> None:
    two = types.SimpleNamespace(cluster_resources=lambda: {"GPU": 2.0, "CPU": 8.0})
    count, resources, seat = clusters._places(two, 4, "cuda")
    assert (count, resources["num_gpus"], seat.share) == (4, 0.5, 0.45)
    assert clusters._places(two, None, "cpu")[0] == 8


def test_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is reserved: each of its processes would play a run of its own."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it once"):
        Simulation(experiment(DpSgd(), workers=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(app, ["run", str(ROOT / "examples" / "digits.toml"), "--out", str(tmp_path / "cli")]) == 2
    assert not (tmp_path / "cli").exists()


def test_the_address_is_a_setting_that_changes_no_result() -> None:
    """In a file, on the command line and in Python; a run goes on elsewhere under the same experiment."""
    digits = ROOT / "examples" / "digits.toml"
    plain, there = read(digits), read(digits, ['run.ray="10.0.0.1:6379"'])
    assert there.run.ray == "10.0.0.1:6379"
    assert list(differences(plain, there)) == []
    assert 'ray = "10.0.0.1:6379"' in to_toml(there)
    assert experiment_over(there, experiment(DpSgd()).federation).ray == "10.0.0.1:6379"
