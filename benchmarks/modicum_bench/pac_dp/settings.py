"""What is measured: the paper's four datasets and budgets, its numbers, and the grids that settings come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Case = Literal["same", "personal"]
CASES: tuple[Case, ...] = ("same", "personal")
STARTS = ("hot", "cold")  # a first model from public records, or none


@dataclass(frozen=True, kw_only=True)
class Task:
    """A dataset as PAC-DP uses it."""

    name: str
    title: str
    backbones: tuple[str, ...]  # weights of backbones whose features are put side by side; none: plain records
    clients: int | None  # None: natural clients
    same: float  # everyone's ε in the paper's uniform row
    personal: dict[float, float]  # ε: share of clients
    proxy: float  # share of the training records that is declared public
    redraw: bool = False  # divide each client's records into training and test anew in every draw
    features: tuple[str, ...] = ("whitened-64", "whitened-128", "discriminant-9")  # see data.features
    rounds: tuple[int, ...] = (10, 20)
    fit_budgets: tuple[float, ...] = ()
    rates: tuple[float, float] = (1.0, 100.0)  # learning rates are tried from the one to the other
    parts: int = 3  # that the public records are divided into for the choice of settings
    tuning: int = 1  # times that every public record judges
    target: float | None = None  # accuracy whose first round is reported
    adam: bool = False  # whether clients' Adam is tried too
    seeds: int = 3
    paper: dict[str, float]  # what it reports, in percent

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.parts * self.tuning))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="mnist",
            title="MNIST",
            backbones=("emnist-letters.npz",),
            clients=50,
            same=0.1,
            personal={0.05: 0.6, 0.1: 0.3, 1.0: 0.1},
            proxy=0.05,
            fit_budgets=(0.05, 0.1, 0.2, 0.5, 1.0),
            target=0.9,
            paper={"same": 94.3, "personal": 90.2},
        ),
        Task(
            name="cifar-10",
            title="CIFAR-10",
            backbones=("cifar-100.npz",),
            clients=50,
            same=1.0,
            personal={0.5: 0.6, 1.0: 0.3, 5.0: 0.1},
            proxy=0.05,
            fit_budgets=(0.5, 1.0, 2.0, 3.0, 5.0),
            target=0.3,
            adam=True,
            paper={"same": 44.2, "personal": 55.0},
        ),
        Task(
            name="cifar-100",
            title="CIFAR-100",
            backbones=("cifar-10.npz", "cifar-10-group.npz"),
            clients=100,
            same=5.0,
            personal={3.0: 0.6, 5.0: 0.3, 10.0: 0.1},
            proxy=0.05,
            fit_budgets=(3.0, 4.0, 5.0, 7.0, 10.0),
            features=("whitened-64", "discriminant-99", "scaled-discriminant-99"),
            rates=(10.0, 1000.0),
            paper={"same": 35.6, "personal": 27.9},
        ),
        Task(
            name="heart-disease",
            title="Heart Disease",
            backbones=(),
            clients=None,
            same=0.1,
            personal={0.01: 0.6, 0.05: 0.3, 0.5: 0.1},
            proxy=0.10,
            redraw=True,
            features=("unit",),
            rounds=(2, 5, 10),
            rates=(0.03, 3.0),
            parts=5,  # a third of 74 records would be a poor start
            tuning=3,
            fit_budgets=(0.01, 0.05, 0.1, 0.5, 1.0),
            seeds=20,
            paper={"same": 74.4, "personal": 75.6},
        ),
    )
}

BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
FIXED = (0.1, 1.0, 5.0, 10.0)  # the paper's fixed bounds
TRIALS = 12  # settings that are tried for each method and case


@dataclass(frozen=True)
class Preset:
    """How much is run. `quick` looks at two tasks and fewer settings; nothing else differs."""

    name: str
    tasks: tuple[str, ...]
    trials: int
    bounds: tuple[float, ...]
    scratch: bool  # whether the block without public records belongs to it
    pretraining: float | None = None  # seconds for a missing backbone; None: those of its recipe

    def rates(self, task: Task, options: int = 2) -> tuple[float, ...]:
        """Learning rates so that rates × options are as many trials for every method."""
        low, high = task.rates
        count = max(2, self.trials // options)
        return tuple(float(f"{low * (high / low) ** (i / (count - 1)):.3g}") for i in range(count))


PRESETS = {
    "quick": Preset("quick", ("mnist", "heart-disease"), 4, (0.1, 0.5, 2.0), scratch=False, pretraining=120.0),
    "paper": Preset("paper", tuple(TASKS), TRIALS, BOUNDS, scratch=True),
}
