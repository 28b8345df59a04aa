"""What is measured: the paper's four datasets and budgets, its numbers, and the grids that settings come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Case = Literal["same", "personal"]
CASES: tuple[Case, ...] = ("same", "personal")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A dataset as PAC-DP uses it."""

    name: str
    title: str
    backbone: str | None  # weights file of the feature proxy's backbone; None: the records as they are
    clients: int | None  # None: natural clients
    same: float  # everyone's ε in the paper's uniform row
    personal: dict[float, float]  # ε: share of clients
    proxy: float  # share of the training records that is declared public
    redraw: bool = False  # divide each client's records into training and test anew in every draw
    sizes: tuple[int, ...] = (64, 128)  # of the whitened features; 0: the records cut to length 1
    rounds: tuple[int, ...] = (10, 20)
    fit_budgets: tuple[float, ...] = ()
    lrs: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0)
    tuning: int = 1  # times as many seeds for the choice of settings as the preset says
    seeds: int = 3
    paper: dict[str, float]  # what it reports, in percent


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="mnist",
            title="MNIST",
            backbone="emnist-letters.npz",
            clients=50,
            same=0.1,
            personal={0.05: 0.6, 0.1: 0.3, 1.0: 0.1},
            proxy=0.05,
            fit_budgets=(0.05, 0.1, 0.2, 0.5, 1.0),
            paper={"same": 94.3, "personal": 90.2},
        ),
        Task(
            name="cifar-10",
            title="CIFAR-10",
            backbone="cifar-100.npz",
            clients=50,
            same=1.0,
            personal={0.5: 0.6, 1.0: 0.3, 5.0: 0.1},
            proxy=0.05,
            fit_budgets=(0.5, 1.0, 2.0, 3.0, 5.0),
            paper={"same": 44.2, "personal": 55.0},
        ),
        Task(
            name="cifar-100",
            title="CIFAR-100",
            backbone="cifar-10.npz",
            clients=100,
            same=5.0,
            personal={3.0: 0.6, 5.0: 0.3, 10.0: 0.1},
            proxy=0.05,
            fit_budgets=(3.0, 4.0, 5.0, 7.0, 10.0),
            lrs=(10.0, 30.0, 100.0, 300.0, 1000.0),
            paper={"same": 35.6, "personal": 27.9},
        ),
        Task(
            name="heart-disease",
            title="Heart Disease",
            backbone=None,
            clients=None,
            same=0.1,
            personal={0.01: 0.6, 0.05: 0.3, 0.5: 0.1},
            proxy=0.10,
            redraw=True,
            sizes=(0,),
            rounds=(2, 5, 10),
            lrs=(0.03, 0.1, 0.3, 1.0, 3.0),
            tuning=10,
            fit_budgets=(0.01, 0.05, 0.1, 0.5, 1.0),
            seeds=20,
            paper={"same": 74.4, "personal": 75.6},
        ),
    )
}

BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
FIXED = (0.1, 1.0, 5.0, 10.0)  # the paper's fixed bounds
HOT_EPOCHS = 60


@dataclass(frozen=True)
class Preset:
    """How much is run. `quick` looks at fewer settings and seeds; nothing else differs."""

    name: str
    tasks: tuple[str, ...]
    every: int  # of a task's learning rates, each `every`-th is tried
    bounds: tuple[float, ...]
    tuning_seeds: int
    seeds: int | None  # None: the task's own

    def lrs(self, task: Task) -> tuple[float, ...]:
        return task.lrs[:: self.every]

    def tuning(self, task: Task) -> tuple[int, ...]:
        return tuple(range(self.tuning_seeds * task.tuning))


PRESETS = {
    "quick": Preset("quick", ("mnist", "heart-disease"), 2, (0.1, 0.5, 2.0), 1, 3),
    "paper": Preset("paper", tuple(TASKS), 1, BOUNDS, 2, None),
}
