"""Clients a second beside pfl and Flower's simulation: the same network, cohort, records and local steps.

    pip install 'modicum[ray]' pfl
    python benchmarks/peers.py [--models cnn-small,mlp] [--device cuda] [--workers 1,2] [--of modicum,pfl,flower]

DP-FedAvg: each client takes one pass over its 60 made-up records of MNIST's shape in batches of 20, its update is
clipped, and the server adds noise. Each row is a process of its own, a worker is a process with one thread, and a
round before those that are timed pays for starting. What else they do differs: Modicum reserves and settles every
client's release in a ledger on disk and adds noise at each client; pfl and Flower add it once and write nothing
down. Modicum's rows also have a digest of model and ledger: the same for any number of workers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modicum.models import build

CLIENTS, RECORDS, BATCH, ROUNDS, LR, CLIP, Z = 100, 60, 20, 3, 0.1, 1.0, 1.0
Marks = Callable[[], None]


def records(client: int) -> tuple[np.ndarray, np.ndarray]:
    """One client's, as numbers in [0, 1]."""
    rng = np.random.default_rng(client)
    return rng.random((RECORDS, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, RECORDS)


def network(name: str) -> nn.Module:
    return build(name, (1, 28, 28), 10, seed=0)


def modicum(name: str, workers: int, device: str, mark: Marks) -> str:
    import modicum as mo
    from modicum.federation.experiment import Experiment
    from modicum.federation.simulation import Simulation
    from modicum.methods import DpFedAvg

    data = mo.from_population(
        CLIENTS, records, classes=10, rounds=ROUNDS, per_round=CLIENTS, test=records(CLIENTS)
    )
    made = Experiment(
        federation=mo.Federation(data, (8.0,) * CLIENTS),
        method=DpFedAvg(batch=BATCH, lr=LR, clip=CLIP),
        model=name,
        rounds=ROUNDS,
        evaluate_every=ROUNDS,
        workers=workers,
        device=device,
    )
    with tempfile.TemporaryDirectory() as folder:
        sim = Simulation(made, Path(folder) / "run")
        for _ in range(ROUNDS):
            sim.step()
            mark()
        bits = sim.model.detach().cpu().numpy().tobytes() + sim.ledger.head().encode()
        sim.close()
    return hashlib.sha256(bits).hexdigest()[:12]


def pfl(name: str, workers: int, device: str, mark: Marks) -> None:  # noqa: ARG001
    """Its workers are those of torchrun."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(name)

        def loss(self, x: Any, y: Any, eval: bool = False) -> torch.Tensor:
            self.inner.train(not eval)
            return nn.functional.cross_entropy(self.inner(_on(x, device)), _on(y, device))

        def metrics(self, x: Any, y: Any, eval: bool = False) -> dict[str, Any]:
            return {}

    class Marking(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            mark()
            return False, Metrics()

    model = Model()
    data = {i: Dataset(tuple(torch.from_numpy(a) for a in records(i)), user_id=str(i)) for i in range(CLIENTS)}
    users = FederatedDataset(data.__getitem__, get_user_sampler("minimize_reuse", list(data)))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP, Z))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS + 1,
            train_cohort_size=CLIENTS,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users, postprocessors=[noise]),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Marking()],
    )


def _on(values: Any, device: str) -> torch.Tensor:
    return torch.as_tensor(values).to(device)


def flower(name: str, workers: int, device: str, mark: Marks) -> None:
    """Its workers are actors of Ray, which its simulation starts here."""
    from flwr.client import ClientApp, NumPyClient
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from flwr.simulation import run_simulation

    class Client(NumPyClient):  # type: ignore[misc]
        def __init__(self, number: int) -> None:
            self.number = number

        def fit(self, parameters: Any, config: Any) -> Any:
            torch.set_num_threads(1)
            model = network(name).to(device)
            model.load_state_dict(dict(zip(model.state_dict(), map(torch.tensor, parameters), strict=True)))
            x, y = (torch.from_numpy(a).to(device) for a in records(self.number))
            steps = torch.optim.SGD(model.parameters(), lr=LR)
            for rows in torch.randperm(RECORDS).split(BATCH):
                steps.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                steps.step()
            return [t.cpu().numpy() for t in model.state_dict().values()], RECORDS, {}

    class Marking(DifferentialPrivacyServerSideFixedClipping):  # type: ignore[misc]
        def aggregate_fit(self, *arguments: Any) -> Any:
            found = super().aggregate_fit(*arguments)
            mark()
            return found

    def client(context: Any) -> Any:
        return Client(int(context.node_config["partition-id"])).to_client()

    def server(context: Any) -> Any:  # noqa: ARG001
        from flwr.common import ndarrays_to_parameters

        first = ndarrays_to_parameters([t.numpy() for t in network(name).state_dict().values()])
        plain = FedAvg(
            fraction_evaluate=0.0, min_fit_clients=CLIENTS, min_available_clients=CLIENTS, initial_parameters=first
        )
        strategy = Marking(plain, noise_multiplier=Z, clipping_norm=CLIP, num_sampled_clients=CLIENTS)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))

    gpu = 0.0 if device == "cpu" else 1.0 / workers
    run_simulation(
        ServerApp(server_fn=server),
        ClientApp(client_fn=client),
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": workers, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": gpu},
        },
    )


PLAY: dict[str, Callable[..., str | None]] = {"modicum": modicum, "pfl": pfl, "flower": flower}


def one(who: str, name: str, workers: int, device: str) -> None:
    """In a process of its own: the times at which rounds ended, as a line."""
    torch.set_num_threads(1)
    marks: list[float] = []
    bits = PLAY[who](name, workers, device, lambda: marks.append(time.monotonic()))
    if os.environ.get("RANK", "0") == "0":
        speed = CLIENTS * (len(marks) - 1) / (marks[-1] - marks[0])
        row = {"who": who, "model": name, "workers": workers, "clients a second": round(speed, 1)}
        print("\n" + json.dumps(row if bits is None else {**row, "bits": bits}))


def command(who: str, name: str, workers: int, device: str) -> list[str]:
    own = [__file__, "--one", who, "--models", name, "--workers", str(workers), "--device", device]
    if who == "pfl" and workers > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        return [sys.executable, *launch, *own]
    return [sys.executable, *own]


def rows(a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in a.models.split(","):
        for who in a.of.split(","):
            for workers in map(int, a.workers.split(",")):
                alone = subprocess.run(
                    command(who, name, workers, a.device),
                    capture_output=True,
                    text=True,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    },
                )
                said = [line for line in alone.stdout.splitlines() if line.startswith('{"who"')]
                yield json.loads(said[-1]) if said else {
                    "who": who, "model": name, "workers": workers, "failed": alone.stderr[-2000:],
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument("--models", default="cnn-small")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--of", default="modicum,pfl,flower")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    if a.one:
        one(a.one, a.models, int(a.workers), a.device)
        return
    done = []
    for row in rows(a):
        done.append(row)
        print(json.dumps(row), flush=True)
        if a.out:
            a.out.write_text(json.dumps(done, indent=1))


if __name__ == "__main__":
    main()
