"""MNIST with a linear model at ε = 0.1 for every record: scattering features, and raw pixels.

    MODICUM_DATA=DIR python benchmarks/mnist_linear.py [--cache FOLDER] [--seeds 3]

50 clients, record-local, zero-out, δ = 1e-5, T rounds of one full-batch step. T and the learning rate are chosen
on a public proxy (5% of the training data, which no client holds): its training part is divided among 50 pretended
clients whose noise is scaled down as their data are, so that the mean gradient has the noise of the real run, and
its validation part decides. The test images are used with the chosen settings only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from modicum.data import Arrays, Dataset, FederatedData, federate, load
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.methods import DpSgd
from modicum.models import build, fixed_features
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.spec import PrivacySpec, Unit

CLIENTS, EPSILON = 50, 0.1
# Nearly every gradient here is longer than C, so C and the learning rate act as one number: C stays 1.
GRID = {"rounds": (5, 10, 25), "clip": (1.0,), "lr": (0.5, 1.0, 2.0, 4.0, 8.0)}
REHEARSALS = range(100, 104)


def scattered(data: Dataset, cache: Path) -> Dataset:
    """Scattering coefficients in place of pixels, computed once."""
    split = fixed_features(build("scattering", data.train.shape, data.classes, seed=0))
    assert split is not None
    parts = {}
    for name, arrays in (("train", data.train), ("test", data.test)):
        path = cache / f"mnist-scattering-{name}.npy"
        if not path.exists():
            with torch.no_grad():
                rows = [
                    split[0](torch.from_numpy(arrays.take(slice(i, i + 500)).scaled())).half().numpy()
                    for i in range(0, len(arrays), 500)
                ]
            np.save(path, np.concatenate(rows))
        parts[name] = Arrays(np.load(path).astype(np.float32), arrays.y)
    return replace(data, train=parts["train"], test=parts["test"])


def centred(data: FederatedData) -> FederatedData:
    """Features minus their mean over the proxy, which is public."""
    middle = data.proxy.scaled().mean(0)

    def shift(arrays: Arrays) -> Arrays:
        return Arrays(arrays.scaled() - middle, arrays.y)

    return replace(
        data,
        clients=tuple(replace(c, train=shift(c.train)) for c in data.clients),
        test=shift(data.test),
        proxy=shift(data.proxy),
        proxy_validation=shift(data.proxy_validation),
    )


def accuracy(data: FederatedData, method: DpSgd, rounds: int, budget: float, seed: int) -> float:
    federation = Federation(data, (budget,) * len(data.clients))
    experiment = Experiment(
        federation=federation, method=method, model="logistic", rounds=rounds, seed=seed, evaluate_every=rounds
    )
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(experiment, Path(folder))
        *_, last = simulation.rounds()
        simulation.close()
    return last.simulated["test_accuracy"]


def rehearse(data: FederatedData, rounds: int, clip: float, lr: float) -> float:
    """Accuracy on the proxy's validation part of a pretended run on its training part."""
    proxy = Dataset("proxy", data.proxy, data.proxy_validation, data.classes)
    pretended = federate(proxy, clients=CLIENTS, partition="iid", seed=0)
    real = calibrate_noise(PrivacySpec(unit=Unit.RECORD), EPSILON, NoSampling(), rounds)
    scale = len(data.proxy) / sum(data.sizes)
    method = DpSgd(clip=clip, lr=lr, steps=1, noise_multiplier=real * scale, aggregation="mean")
    # The proxy is public: nothing is protected here, so its budget is as large as the noise makes it.
    return statistics.fmean(accuracy(pretended, method, rounds, 1e5, seed) for seed in REHEARSALS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the steps are small
    mnist = load("mnist")
    results = {}
    for name, dataset, centre in (
        ("raw pixels", mnist, False),
        ("raw pixels, centred on the proxy", mnist, True),
        ("scattering", scattered(mnist, given.cache), False),
        ("scattering, centred on the proxy", scattered(mnist, given.cache), True),
    ):
        data = federate(dataset, clients=CLIENTS, partition="iid", seed=0, proxy=0.05)
        data = centred(data) if centre else data
        tried = {
            setting: rehearse(data, *setting)
            for setting in itertools.product(GRID["rounds"], GRID["clip"], GRID["lr"])
        }
        best = max(tried, key=lambda s: tried[s])
        rounds, clip, lr = best
        print(f"{name}: chosen T={rounds} C={clip} lr={lr} (proxy validation {tried[best]:.3f})", flush=True)
        method = DpSgd(clip=clip, lr=lr, steps=1, aggregation="mean")
        found = [accuracy(data, method, rounds, EPSILON, seed) for seed in range(given.seeds)]
        results[name] = {
            "rounds": rounds,
            "clip": clip,
            "lr": lr,
            "proxy_validation": {str(s): a for s, a in tried.items()},
            "test_accuracy": found,
        }
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(f"{name}: test accuracy {statistics.fmean(found):.4f} ± {spread:.4f} over {len(found)} seeds")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
