"""One training run of the benchmark, and how its settings are chosen."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import modicum as mo
from modicum.data import Dataset, federate

CLIENTS = 20
BUDGETS = (1.0, 3.0, 8.0, float("inf"))
VIEWS = {"messages": "server-sees-messages", "sums": "secure-aggregation"}
HELD_OUT = 0.1  # of the training records, for choosing settings
CHOICE_SEED = 1_000
RATES, ROUNDS = (4.0, 16.0, 64.0), (30, 100)
METHODS = ("auto", "auto from names", "dp-sgd")


@dataclass(frozen=True)
class Cell:
    """What decides one figure."""

    method: str  # from names: its first model was fitted to what classes are about, which is public
    clients: int
    view: str
    budget: float
    seed: int
    lr: float = 0.0  # auto has none
    rounds: int = ROUNDS[0]

    @property
    def key(self) -> str:
        """As results are stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def settings(self) -> Any:
        """Of the method: one step on all records a round."""
        view: Any = VIEWS[self.view]
        return mo.methods.DpSgd(lr=self.lr, clip=1.0, view=view) if self.lr else mo.methods.Auto(view=view)


def play(cell: Cell, data: Dataset, names: Dataset) -> float:
    """Accuracy on the dataset's test records; `names` are public."""
    proxy = names if cell.method.endswith("from names") else False
    with tempfile.TemporaryDirectory() as folder:
        run = mo.train(
            federate(data, clients=cell.clients, seed=cell.seed, proxy=proxy),
            budgets=cell.budget,
            method=cell.settings,
            rounds=cell.rounds,
            seed=cell.seed,
            server=mo.Server(evaluate_every=cell.rounds),
            watching=mo.Watching(progress=False),
            folder=Path(folder) / "run",
        )
        return run.accuracy


def settings_of(cell: Cell) -> Iterator[Cell]:
    """The same with every setting that may be chosen."""
    for lr, rounds in product(RATES if cell.method == "dp-sgd" else (0.0,), ROUNDS):
        yield replace(cell, lr=lr, rounds=rounds)


def for_choosing(data: Dataset) -> Dataset:
    """Training records alone, a tenth of them as the test: no test record decides a setting."""
    order = np.random.default_rng(CHOICE_SEED).permutation(len(data.train))
    cut = int(len(order) * HELD_OUT)
    return replace(data, train=data.train.take(order[cut:]), test=data.train.take(order[:cut]))
