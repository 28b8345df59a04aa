"""What is measured: tasks, budgets by participation, and variants that differ in one part each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from modicum.methods import FedMap
from modicum_bench.fedmap.regimes import REGIMES

CLIENTS, ALPHA, DELTA, PROXY = 100, 0.5, 1e-5, 0.05
KINDS = (0.7, 1.0, 1.4)


@dataclass(frozen=True)
class Task:
    """A dataset with the network that is trained from nothing, and what the paper prints (Table 4)."""

    name: str
    model: str
    rounds: int
    budgets: dict[float, float]  # by participation
    printed: dict[float, float]
    clients: int = CLIENTS
    proxy: float = PROXY  # share of public records


TASKS = {
    "fashion-mnist": Task(
        "fashion-mnist",
        "lenet-contrast",
        150,
        {0.1: 1.04, 0.2: 3.57, 0.3: 7.71},
        {0.1: 0.7824, 0.2: 0.7940, 0.3: 0.8011},
    ),
    "cifar-10": Task(
        "cifar-10",
        "cnn-contrast",
        150,
        {0.1: 2.19, 0.2: 8.81, 0.3: 19.78},
        {0.1: 0.4253, 0.2: 0.4435, 0.3: 0.4700},
    ),
    "svhn": Task(
        "svhn",
        "cnn-contrast",
        150,
        {0.1: 2.23, 0.2: 10.38, 0.3: 27.64},
        {0.1: 0.4016, 0.2: 0.4813, 0.3: 0.4926},
    ),
    "digits": Task("digits", "logistic", 20, {0.5: 2.0}, {}, clients=10, proxy=0.2),
    **{name: Task(name, "logistic", 20, {0.5: e}, {}, clients=10, proxy=0.2) for name, e in REGIMES.items()},
}

for _name, _kind in (("fashion-mnist", "hog"), ("svhn", "hog"), ("cifar-10", "features")):  # rivals
    TASKS[f"{_name} {_kind}"] = replace(TASKS[_name], name=f"{_name} {_kind}", model="logistic")

LARGE = "resnet18"  # once each, to show its limit
for _name in ("cifar-10", "svhn"):
    TASKS[f"{_name} {LARGE}"] = replace(TASKS[_name], name=f"{_name} {LARGE}", model=LARGE, rounds=30)

VARIANTS: dict[str, dict[str, Any]] = {
    "metanet": {"clipping": "metanet", "kinds": KINDS},
    "fixed": {"clipping": "fixed", "kinds": ()},
    "aqc": {"clipping": "quantile", "kinds": ()},
    "auto-s": {"clipping": "auto", "kinds": ()},
    "plug-in": {"clipping": "plug-in", "kinds": ()},
    "preset, low noise first": {"clipping": "fixed", "kinds": KINDS},
    "preset, low noise last": {"clipping": "fixed", "kinds": KINDS[::-1]},
    "mlp": {"clipping": "mlp", "kinds": KINDS},
    "metanet, untrained": {"clipping": "metanet", "kinds": KINDS},
    "metanet, blind": {"clipping": "metanet", "kinds": KINDS, "feedback": False},
    "metanet, filter": {"clipping": "metanet", "kinds": KINDS, "noise": "filter"},
}
TRAINED = {"metanet": "bert", "metanet, blind": "bert", "metanet, filter": "bert", "mlp": "mlp"}
"""Variants with a trained network, and its body."""


@dataclass(frozen=True)
class Choice:
    """What is chosen on public records, the same for all variants of a task and participation."""

    lr: float
    momentum: float
    share: float = 1.0  # of the median norm of a public gradient at the first model: C₀
    average: float = 0.0  # β of the average over rounds
    clip: float = 1.0  # C₀, once it is known


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    participation: float
    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task} {self.participation:g} {self.variant} {self.seed}"

    @property
    def budget(self) -> float:
        return TASKS[self.task].budgets[self.participation]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "budget": self.budget}


def method(variant: str, choice: Choice, network: str | None = None) -> FedMap:
    """One step a participation on all of a client's records; the server keeps the momentum."""
    made = FedMap(
        lr=choice.lr, clip=choice.clip, server_momentum=choice.momentum, steps=1, delta=DELTA, **VARIANTS[variant]
    )
    return replace(made, network=network) if variant in TRAINED else made
