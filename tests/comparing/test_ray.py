"""A comparison on two nodes of a Ray cluster, of which one is killed; needs `ray`, which is an extra."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modicum.comparing import compare
from modicum.errors import UserError
from tests.comparing.test_compare import TEXT

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'modicum[ray]'")
METHODS = ["dp-sgd", "fedavg"]


@pytest.mark.heavy
def test_a_lost_node_s_cells_are_played_again_to_the_same_bits(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    (tmp_path / "tiny.toml").write_text(TEXT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    lost = cluster.add_node(num_cpus=1)
    path = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=path)

    def kill(done: int, _: int) -> None:
        if done == 1:
            cluster.remove_node(lost, allow_graceful=False)

    try:
        there = compare(
            tmp_path / "tiny.toml", methods=METHODS, seeds=3, ray=cluster.address, folder=tmp_path / "there",
            progress=kill,
        )  # fmt: skip
    finally:
        ray.shutdown()
        cluster.shutdown()
    here = compare(tmp_path / "tiny.toml", methods=METHODS, seeds=3, folder=tmp_path / "here")
    assert there.to_csv() == here.to_csv()
    for row in here.rows:
        ours, theirs = (c.folder / row["folder"] / "model.safetensors" for c in (here, there))
        assert ours.read_bytes() == theirs.read_bytes()


def test_runs_with_real_noise_are_not_sent_away(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TEXT + "simulation = false\n")
    with pytest.raises(UserError, match="stay on this machine"):
        compare(tmp_path / "tiny.toml", seeds=1, ray="local", folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()
