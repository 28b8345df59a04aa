"""One training run of the benchmark, and how its settings are chosen."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
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
RATES, ROUNDS = (4.0, 16.0, 64.0), 30


@dataclass(frozen=True)
class Cell:
    """What decides one figure."""

    method: str  # auto or dp-sgd
    clients: int
    view: str
    budget: float
    seed: int
    lr: float = 0.0  # auto has none
    rounds: int = ROUNDS

    @property
    def key(self) -> str:
        """As results are stored."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def settings(self) -> Any:
        """Of the method: one step on all records a round."""
        view: Any = VIEWS[self.view]
        if self.method == "auto":
            return mo.methods.Auto(view=view)
        return mo.methods.DpSgd(lr=self.lr, clip=1.0, view=view)


def play(cell: Cell, data: Dataset) -> float:
    """Accuracy on the dataset's test records."""
    with tempfile.TemporaryDirectory() as folder:
        run = mo.train(
            federate(data, clients=cell.clients, seed=cell.seed),
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
    if cell.method == "auto":
        yield cell
        return
    for lr in RATES:
        yield replace(cell, lr=lr)


def for_choosing(data: Dataset) -> Dataset:
    """Training records alone, a tenth of them as the test: no test record decides a setting."""
    order = np.random.default_rng(CHOICE_SEED).permutation(len(data.train))
    cut = int(len(order) * HELD_OUT)
    return replace(data, train=data.train.take(order[cut:]), test=data.train.take(order[:cut]))
