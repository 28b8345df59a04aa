"""A round of client-level training in other libraries: local steps, a clipped update, noise on each client.

Each library is first run without noise and compared with the same round written out in plain PyTorch, and is timed
only where it agrees. Libraries are imported when they are asked for; who is not installed is missing.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modicum.core.parts import Batch
from modicum.models import build
from modicum_bench.cohort import records
from modicum_bench.timing import Timing

SHAPE, CLASSES, RECORDS = (1, 28, 28), 10, 200


@dataclass(frozen=True)
class Round:
    """What every library is asked to do. Client i's first `steps · batch` records are used in order."""

    clients: int = 50
    steps: int = 5
    batch: int = 10
    rate: float = 0.1
    bound: float = 1.0
    noise_multiplier: float = 1.0
    rounds: int = 8


@functools.cache
def client_data(i: int) -> Batch:
    return records(RECORDS, SHAPE, CLASSES, i)


def first_model() -> nn.Module:
    return build("mlp", SHAPE, CLASSES, seed=0)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def plain_round(work: Round) -> Tensor:
    """The model after one round without noise."""
    first = first_model()
    start, total = flat(first), torch.zeros_like(flat(first))
    for i in range(work.clients):
        model = copy.deepcopy(first)
        train(model, work, client_data(i))
        update = flat(model) - start
        total += update * min(1.0, work.bound / float(torch.linalg.vector_norm(update)))
    return start + total / work.clients


def train(model: nn.Module, work: Round, data: Batch) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=work.rate)
    for step in range(work.steps):
        part = slice(step * work.batch, (step + 1) * work.batch)
        optimiser.zero_grad()
        loss = cross_entropy(model(data.x[part]), data.targets["y"][part])
        torch.autograd.backward(loss)
        optimiser.step()


class Laps:
    """When each round ended; the first two are warm-up."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def lap(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def timing(self, share: int) -> Timing:
        kept = self.ends[2:]
        pairs = list(itertools.pairwise(kept))
        wall, own = ([(b[k] - a[k]) / share for a, b in pairs] for k in (0, 1))
        return Timing.of(wall, own)


def pfl_rounds(work: Round) -> tuple[Tensor, Laps]:
    """FederatedAveraging with the Gaussian mechanism applied by each user, in pfl's in-process simulation."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism

    set_framework_module(pytorch_ops)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = first_model()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
            return {}

    laps = Laps()

    class LapAfterRound(TrainingProcessCallback):  # type: ignore[misc, unused-ignore]
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Any]:
            laps.lap()
            return False, Metrics()

    def user(i: int) -> Any:
        data, used = client_data(i), work.steps * work.batch
        return PyTorchTensorDataset((data.x[:used], data.targets["y"][:used]))

    order = iter([i % work.clients for i in range(work.clients * (work.rounds + 1))])
    users = FederatedDataset(user, lambda: next(order))
    mechanism = GaussianMechanism(work.bound, work.noise_multiplier)
    module = Model()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=work.rounds + 1,
            train_cohort_size=work.clients,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(users, users, postprocessors=[mechanism]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.rate, local_batch_size=work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[LapAfterRound()],
        send_metrics_to_platform=False,
    )
    return flat(module), laps


def flower_rounds(work: Round) -> tuple[Tensor, Laps]:
    """FedAvg with LocalDpMod on each client, in Flower's simulation on ray."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.clientapp.mod import LocalDpMod
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    # The mod draws noise of std sensitivity·√(2·ln(1.25/δ))/ε, that is sensitivity with this ε.
    delta = 1e-5
    epsilon = float(torch.tensor(1.25 / delta).log().mul(2).sqrt())
    clients = ClientApp(mods=[LocalDpMod(work.bound, work.noise_multiplier * work.bound, epsilon, delta)])

    @clients.train()  # type: ignore[untyped-decorator, unused-ignore]
    def fit(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = first_model()
        arrays: Any = message.content["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict())
        train(model, work, client_data(int(context.node_config["partition-id"])))
        content: dict[str, Any] = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    laps, final = Laps(), first_model()
    server = ServerApp()

    def watch(_: int, arrays: Any) -> None:
        laps.lap()
        final.load_state_dict(arrays.to_torch_state_dict())

    @server.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, _context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=work.clients, min_train_nodes=work.clients)
        arrays = ArrayRecord(first_model().state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=work.rounds, evaluate_fn=watch)

    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, clients, work.clients, backend_config={"client_resources": resources})
    return flat(final), laps


LIBRARIES: dict[str, tuple[tuple[str, ...], Callable[[Round], tuple[Tensor, Laps]]]] = {
    "pfl": (("pfl",), pfl_rounds),
    "Flower": (("flwr", "ray"), flower_rounds),
}


def peer_rounds(work: Round) -> Iterator[tuple[str, Timing | None, str]]:
    """Each library's time per client, None where it is not timed, with a word on why or on its agreement."""
    for name, (packages, run) in LIBRARIES.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            yield name, None, f"{missing[0]} is not installed"
            continue
        try:
            yield name, *_checked(work, run)
        except Exception as error:
            yield name, None, f"failed: {' '.join(str(error).split())[:120]}"


def _checked(work: Round, run: Callable[[Round], tuple[Tensor, Laps]]) -> tuple[Timing | None, str]:
    quiet = Round(**{**vars(work), "noise_multiplier": 0.0, "rounds": 1})
    start, truth = flat(first_model()), plain_round(work)
    found, _ = run(quiet)
    error = float(torch.linalg.vector_norm(found - truth) / torch.linalg.vector_norm(truth - start))
    if not error < 1e-3:
        return None, f"not timed: its round without noise differs by {error:.1e}"
    return run(work)[1].timing(work.clients), f"its round without noise differs by {error:.1e}"
