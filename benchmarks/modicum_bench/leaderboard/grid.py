"""What is compared: tasks, cells and methods, and a method with settings in units that fit every task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modicum.core.setting import MethodSpec
from modicum.federation.experiment import Federation
from modicum.methods import Aqc, Auto, CgmMedian, ClassMeans, DpSgd, PacDp, RpdpFl
from modicum.privacy.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum_bench.public_geometry.tasks import SPEC, Task

Budget = float | tuple[float, ...]
ROUNDS = 30
RATES = (0.1, 0.3, 1.0, 3.0)
CHOSEN_FOR = (0.05, 1.0, 5.0)  # a cell takes the settings of the largest of these that is not above its budget
STAND_IN = "mnist"  # whose public proxy, letters, stands in for every task
PUBLIC = 0.05  # share of a task's records that is public in hot cells


@dataclass(frozen=True)
class Cell:
    task: str
    clients: int
    budget: Budget  # several: in turn, one a client
    hot: bool = False

    @property
    def smallest(self) -> float:
        return min(self.budget) if isinstance(self.budget, tuple) else self.budget

    @property
    def name(self) -> str:
        budget = "/".join(f"{b:g}" for b in self.budget) if isinstance(self.budget, tuple) else f"{self.budget:g}"
        return f"{self.task}, {self.clients}, ε = {budget}, {'hot' if self.hot else 'cold'}"

    @property
    def seeds(self) -> int:
        """Small test sets need many draws."""
        return 10 if self.task in ("digits", "heart-disease") else 3


QUICK = (
    *(Cell("digits", 20, e) for e in (0.5, 2.0, (0.5, 1.0, 5.0))),
    Cell("digits", 20, 2.0, hot=True),
    Cell("heart-disease", 4, 1.0),
    *(Cell("heart-disease", 4, e, hot=True) for e in (0.1, 1.0, (0.05, 0.5))),
    *(Cell("mnist", 50, e) for e in (0.05, 0.1, 1.0, (0.05, 0.1, 1.0))),
    Cell("mnist", 10, 0.1),
    *(Cell("mnist", 50, e, hot=True) for e in (0.1, 1.0)),
)
PAPER = (
    *QUICK,
    *(Cell("cifar-10", 50, e) for e in (0.5, 1.0, 5.0)),
    *(Cell("cifar-10", 50, e, hot=True) for e in (1.0, 5.0, (0.5, 1.0, 5.0))),
    Cell("cifar-10", 10, 8.0, hot=True),
)
PRESETS = {"quick": QUICK, "paper": PAPER}


def tasks(backbones: Path) -> dict[str, Task]:
    """Those that stand on a backbone and a public dataset with other labels."""
    return {
        "mnist": Task("mnist", "emnist-merge47:10-46", backbones / "emnist-letters.npz"),
        "cifar-10": Task("cifar-10", "cifar-100", backbones / "cifar-100.npz"),
    }


@dataclass(frozen=True)
class Row:
    """`make(lr, largest budget)`. All take one whole-batch step a round, with momentum ½ on the server."""

    make: Callable[[float, float], MethodSpec]
    tuned: bool = True


ROWS: dict[str, Row] = {
    "auto": Row(lambda lr, most: Auto(), tuned=False),  # noqa: ARG005
    "class-means": Row(lambda lr, most: ClassMeans(), tuned=False),  # noqa: ARG005
    "dp-sgd": Row(lambda lr, most: DpSgd(steps=1, lr=lr, server_momentum=0.5)),  # noqa: ARG005
    "aqc": Row(lambda lr, most: Aqc(steps=1, lr=lr, server_momentum=0.5)),  # noqa: ARG005
    "cgm-median": Row(lambda lr, most: CgmMedian(steps=1, lr=lr, server_momentum=0.5)),  # noqa: ARG005
    "pac-dp": Row(lambda lr, most: PacDp(steps=1, lr=lr, server_momentum=0.5)),  # noqa: ARG005
    "rpdp-fl": Row(
        lambda lr, most: RpdpFl(steps=1, lr=lr, full_budget=most, aggregation="noise-aware", server_momentum=0.5)
    ),
}


def made(name: str, rate: float, federation: Federation) -> MethodSpec:
    """The method whose steps together leave noise `rate` in a logit, for records of length 1 and C = 1."""
    pairs = list(zip(federation.budgets, federation.data.sizes, strict=True))
    noises = {b: calibrate_noise(SPEC, b, NoSampling(), ROUNDS) for b in set(federation.budgets)}
    noise = 1 / math.sqrt(sum((n / noises[b]) ** 2 for b, n in pairs))
    lr = rate / (noise * math.sqrt(ROUNDS)) / 2  # momentum ½ doubles a step
    return ROWS[name].make(lr, max(federation.budgets))
