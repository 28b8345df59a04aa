"""The randomness contract: a function of the seed and the keys, not of order, engine or process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.parts import Backend, Batch, Job, Mechanism
from modicum.federation.experiment import Experiment
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Aqc, DpFedAvg, DpSgd, FedAvg
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
from modicum.training.local_steps import LocalSteps
from tests.audits.worlds import experiment
from tests.mechanisms.stage import Stage, double_model, records

METHODS = {
    "record": DpSgd(batch=4, epochs=2),
    "record, adaptive bound": Aqc(batch=4),
    "client, local": DpFedAvg(view="server-sees-messages", batch=4),
    "client, secure aggregation": DpFedAvg(view="secure-aggregation", batch=4),
    "client, secret cohort": DpFedAvg(view="trusted-server", rate=0.5, batch=4),
    "no privacy": FedAvg(batch=4),
}


def _final(run: Experiment, folder: Path, noise: object = None) -> tuple[Tensor, list[bytes]]:
    transcript = Remember()
    made = Simulation(run, folder, transcript=transcript, noise=noise)  # type: ignore[arg-type]
    list(made.rounds())
    made.close()
    return made.model.clone(), [s.content for s in transcript.seen]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_is_bit_identical_and_another_is_not(name: str, tmp_path: Path) -> None:
    """Every byte on the wire and the model; whatever the process did with torch's own generator before."""
    run = experiment(METHODS[name], 0)
    torch.manual_seed(1)
    first, seen = _final(run, tmp_path / "a")
    torch.manual_seed(2)
    again, seen_again = _final(run, tmp_path / "b")
    assert torch.equal(first, again)
    assert seen == seen_again
    other, _ = _final(replace(run, seed=1), tmp_path / "c")
    assert not torch.equal(first, other)


def test_deployed_noise_is_not_seeded(tmp_path: Path) -> None:
    run = experiment(METHODS["record"], 0)
    first, _ = _final(run, tmp_path / "a", CryptoNoise())
    again, _ = _final(run, tmp_path / "b", CryptoNoise())
    assert not torch.equal(first, again)


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["record", "client, local"])
def test_dropout_draws_from_the_noise_source(name: str, tmp_path: Path) -> None:
    """Repeatable in simulation, secret in deployment, and the caller's generator is left as it was."""
    torch.manual_seed(0)
    run = replace(experiment(METHODS[name], 0), model=WithDropout())
    before = torch.get_rng_state()
    first, _ = _final(run, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    again, _ = _final(run, tmp_path / "b")
    assert torch.equal(first, again)


def test_a_new_process_computes_the_same_bits(tmp_path: Path) -> None:
    """Nothing depends on hash seeds, import order or what ran before."""
    code = (
        "import sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from tests.federation.test_randomness import METHODS, _final, experiment\n"
        "model, _ = _final(experiment(METHODS['record'], 0), Path(sys.argv[1]))\n"
        "print(model.double().numpy().tobytes().hex())"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path / "there")]
    there = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    here, _ = _final(experiment(METHODS["record"], 0), tmp_path / "here")
    assert there == here.double().numpy().tobytes().hex() + "\n"


MECHANISMS: dict[str, Mechanism] = {
    "record": RecordLocal(batch=4, steps=5),
    "client": ClientLevel(local=LocalSteps(batch=3, steps=5)),
}


def _jobs(stage: Stage, theta: Tensor, clients: int = 5) -> list[Job]:
    return [stage.job(f"c{i}", records(i, 7 + i), theta, SimulatedNoise(9)) for i in range(clients)]


def _updates(mechanism: Mechanism, backend: Backend, theta: Tensor, *, reverse: bool = False) -> Tensor:
    stage = Stage(mechanism, backend, lr=0.3)
    jobs = _jobs(stage, theta)
    results = stage.run(jobs[::-1] if reverse else jobs)
    messages = sorted((message for message, _ in results), key=lambda m: m.client)
    return torch.stack([m.update for m in messages])


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("kind", ["linear", "dense", "conv"])
def test_one_round_agrees_across_engines(name: str, kind: str) -> None:
    """Double precision: to 1e-8."""
    updates = []
    for engine in (LoopBackend, FusedBackend):
        model = double_model(kind, 3)
        backend = engine(model)
        theta = backend.layout.read(model).clone()
        updates.append(_updates(MECHANISMS[name], backend, theta))
    assert (updates[0] - updates[1]).abs().max() < 1e-8
    assert updates[0].abs().max() > 1e-3


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_order_of_clients_does_not_matter(name: str) -> None:
    model = double_model("dense", 3)
    backend = LoopBackend(model)
    theta = backend.layout.read(model).clone()
    one, other = (_updates(MECHANISMS[name], backend, theta, reverse=r) for r in (False, True))
    assert torch.equal(one, other)


def test_each_client_depends_on_its_own_job_alone() -> None:
    """Another client's data in the same stack change nothing for this one."""
    model = double_model("dense", 3)
    backend = LoopBackend(model)
    stage = Stage(MECHANISMS["record"], backend)
    theta = backend.layout.read(model).clone()
    jobs = _jobs(stage, theta)
    other = replace(jobs[1], records=Batch(jobs[1].records.x * 100, jobs[1].records.targets))
    alone, together = stage.run(_jobs(stage, theta))[0][0], stage.run([jobs[0], other, *jobs[2:]])[0][0]
    np.testing.assert_array_equal(alone.update.numpy(), together.update.numpy())
