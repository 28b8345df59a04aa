"""CIFAR-10 on features of a network that ImageNet trained: `auto` and a plain DP-SGD head on the same features.

    python benchmarks/backbones.py --backbone efficientnet-lite0 --out benchmarks/backbones.jsonl --seed 0

The geometry is fitted to CIFAR-100 (as much of it as the data folder has). No label of the task is public. The
rival stands on the features themselves, less the mean of CIFAR-100's and cut to length 1, with two settings of
which the better one on the test counts: that favours it. Settings of `auto` are those of the library.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from modicum.core.setting import MethodSpec
from modicum.data import Dataset, assign_budgets, federate, load
from modicum.data.arrays import Arrays, FederatedData
from modicum.data.fetch import data_folder
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import Auto
from modicum.public.features import behind, stand_on
from modicum_bench.centred import centred
from modicum_bench.leaderboard.grid import MESSAGES, ROUNDS, SUM, made, spec_of

CELLS = (
    (50, 1.0, MESSAGES),
    (50, 0.1, SUM),
    (50, 0.5, MESSAGES),
    (50, 5.0, MESSAGES),
    (50, 1.0, SUM),
    (10, 8.0, MESSAGES),
)
RIVAL = ((0.3, 0.3), (1.0, 0.3))  # noise that all steps leave in a logit, and the bound
FEATURES = "discriminant:auto"


def accuracy(federation: Federation, spec: MethodSpec, seed: int) -> float:
    """On the test, after all rounds."""
    experiment = Experiment(
        federation=federation, method=spec, model="logistic", rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS
    )
    run = Rehearsal(experiment)
    list(run.rounds())
    test = run.data.test
    told = run.backend.outputs(run.server.full_model(run.data.first), test.x).argmax(-1)
    return float((told == test.targets["y"]).double().mean())


def ridge(data: FederatedData, decay: float = 0.01) -> float:
    """Accuracy of least squares on everybody's records together: the ceiling without privacy."""
    whole = Arrays.concatenate([c.train for c in data.clients])
    x, y = torch.from_numpy(whole.x).double(), torch.nn.functional.one_hot(torch.from_numpy(whole.y)).double()
    gram = x.T @ x
    gram += decay * gram.diagonal().mean() * torch.eye(len(gram), dtype=x.dtype)
    weight = torch.linalg.solve(gram, x.T @ (y - y.mean(0)))
    told = (torch.from_numpy(data.test.x).double() @ weight + y.mean(0)).argmax(1)
    return float((told.numpy() == data.test.y).mean())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="CIFAR-10 on ImageNet features.")
    parser.add_argument("--backbone", nargs="+", default=["efficientnet-lite0"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=len(CELLS), help="of the cells, in their order")
    given = parser.parse_args()
    cache = data_folder() / "features"
    own, _, public = behind(given.backbone, cache, load("cifar-10"), False, load("cifar-100"))
    assert public is not None
    play(own, public, given.out, given.seed, given.first)


def play(own: Dataset, public: Dataset, out: Path, seed: int, first: int = len(CELLS)) -> None:
    """All cells of one draw, into a file as they come."""

    def keep(**found: Any) -> None:
        print(found, flush=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    name = own.made_by.name if own.made_by else ""
    mean = public.train.x.mean(0)
    if seed == 0:
        keep(method="ridge, no privacy", features=name, accuracy=ridge(centred(federate(own, clients=50), mean)))
    for clients, budget, view in CELLS[:first]:
        data = federate(own, clients=clients, seed=seed)
        budgets = assign_budgets(budget, clients)
        about = {"features": name, "clients": clients, "budget": budget, "view": view, "seed": seed}
        begun = time.process_time()
        known = stand_on(data, FEATURES, budgets, lambda n=clients, v=view: spec_of(n, v), public)
        found = accuracy(Federation(known, budgets), Auto(view=view), seed)
        seconds = round(time.process_time() - begun)
        keep(method="auto", **about, dimensions=known.input_shape[0], accuracy=found, processor_seconds=seconds)
        plain = Federation(centred(data, mean), budgets)
        for choice in RIVAL:
            spec = made("dp-sgd", choice, plain, view)
            keep(method="dp-sgd", choice=choice, **about, accuracy=accuracy(plain, spec, seed))


if __name__ == "__main__":
    main()
