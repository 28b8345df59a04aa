"""What is run: tasks, methods, and the order in which cells come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from modicum.core.setting import MethodSpec
from modicum.errors import UserError
from modicum.methods import AcdpPfsd, DpFedSam, DpPfsd, FedAvg, FedPer, PFedSd, Pfsd

CHOICES = Path(__file__).parents[2] / "acdp-pfsd" / "choices.json"
SEEDS = (0, 1, 2)
LETTERS = "letters"  # directions behind a backbone of rendered characters
HEADS = ("features", "components", LETTERS)
HOT = 30  # epochs of a hot start
STEPS, MORE_STEPS = 5, 20  # Q
LONGER = f"q{MORE_STEPS}"
BUDGET = 1e5  # more than any cell spends: these experiments fix the noise, and their ε follows


@dataclass(frozen=True)
class Task:
    """One of the paper's datasets. `cap` limits the records of a class, to come near the paper's balanced data."""

    data: str
    model: str
    clip: float  # the paper's fixed bound, and the middle of the agent's range
    shards: Mapping[str, int]
    sigmas: tuple[float, ...]
    cap: int | None = None


TASKS: dict[str, Task] = {
    "digits": Task("digits", "mlp", 0.5, {"s1": 4, "s2": 2}, (1.0,)),  # for a quick look: not in the paper
    "emnist": Task("emnist-merge47", "cnn8", 0.5, {"s1": 15, "s2": 5}, (1.0, 0.8, 1.3), cap=2400),
    "cifar-10": Task("cifar-10", "resnet18", 1.5, {"s1": 4, "s2": 2}, (1.0, 1.5, 2.1)),
    "svhn": Task("svhn", "resnet18", 1.5, {"s1": 4, "s2": 2}, (1.0, 1.5, 2.1)),
}


@dataclass(frozen=True)
class Choice:
    """What the paper leaves open, chosen for a task on validation records of a seed that is not reported."""

    lr: float = 0.1
    momentum: float = 0.0
    alpha: float = 0.5
    server_lr: float = 1.0
    server_momentum: float = 0.0
    tuning_lr: float = 0.05  # of the further local steps
    options: Mapping[str, float] = field(default_factory=dict)  # of the model
    clip: float | None = None  # in place of the task's bound
    prior: float = 0.0  # weight of a client's class frequencies in its loss
    average: float = 0.0  # β of the average of models that is reported
    agent: Mapping[str, float] = field(default_factory=dict)  # settings of the agent that differ from its defaults
    ascent: float = 0.05  # DP-FedSAM's step uphill

    def local(self, steps: int) -> dict[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum, "steps": steps}

    def server(self) -> dict[str, Any]:
        return {"server_lr": self.server_lr, "server_momentum": self.server_momentum}


@dataclass(frozen=True)
class Choices:
    """For each method of a setting; private ones that were not searched there use what was found for DP-pFSD."""

    found: Mapping[str, Choice]

    def of(self, cell: Cell) -> Choice:
        searched = () if cell.method in CLEAR else (f"{cell.setting}/dp-pfsd",)
        for key in (cell.chooses, replace(cell, view=VIEWS[0]).chooses, *searched, cell.setting):
            if key in self.found:
                return self.found[key]
        raise UserError(f"no settings were chosen for {cell.chooses}: make them with --stage choose")


def read_choices(path: Path = CHOICES) -> Choices:
    if not path.is_file():
        raise UserError(f"no choices at {path}: make them with --stage choose")
    return Choices({key: Choice(**c) for key, c in json.loads(path.read_text())["choices"].items()})


@dataclass(frozen=True)
class Cell:
    """One run. `clip` is None for the task's own C_fix.

    `variant` is "plain" for local training as printed and the last model, "hot" for a first model from the proxy,
    and "q20" for twenty minibatches a round.
    """

    task: str
    method: str
    sigma: float = 1.0
    shards: str = "s2"
    seed: int = 0
    clients: int = 50
    per_round: int = 50
    rounds: int = 100
    view: str = "secure-aggregation"
    clip: float | None = None
    model: str = ""  # "": the task's; HEADS: a linear head on what public records decided; else a network's name
    variant: str = ""
    factor: float = 1.0  # of the bound that was chosen
    epsilon: float | None = None  # None: the noise is σ, else it is calibrated to this ε at δ = 1e-5

    @property
    def name(self) -> str:
        parts = [self.task, self.shards, f"sigma{self.sigma:g}", self.method, self.view]
        parts += [f"{self.clients}x{self.per_round}", f"seed{self.seed}"]
        if self.clip is not None:
            parts.append(f"C{self.clip:g}")
        if self.factor != 1:
            parts.append(f"times{self.factor:g}")
        if self.epsilon is not None:
            parts.append(f"eps{self.epsilon:g}")
        return "_".join([*parts, *filter(None, (self.model, self.variant))])

    @property
    def network(self) -> str:
        return "logistic" if self.model in HEADS else self.model or TASKS[self.task].model

    @property
    def hot_start(self) -> int:
        """Epochs on public records before the first round; rendered characters give a head at once."""
        return HOT if self.variant == "hot" and self.model != LETTERS else 0

    @property
    def steps(self) -> int:
        """Q, the minibatches of a round."""
        return MORE_STEPS if self.variant == LONGER else STEPS

    @property
    def setting(self) -> str:
        return "-".join(filter(None, (self.task, self.model, self.variant)))

    @property
    def chooses(self) -> str:
        """Under which key its choice stands; a view of its own may have one of its own."""
        view = "" if self.view == VIEWS[0] else f"@{self.view}"
        return f"{self.setting}/{SAME.get(self.method, self.method)}{view}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


METHODS = (
    "pfsd",
    "dp-pfsd",
    "aqc",
    "acdp-pfsd",
    "bandit",
    "dp-fedsam",
    "fedavg",
    "fedper",
    "pfedsd",
    "dp-pfsd-no-distillation",
    "dp-pfsd-target-only",
    "dp-pfsd-non-target-only",
    "acdp-pfsd-bold",
    "acdp-pfsd-faithful",
    "acdp-pfsd-pretrained",
)
AS_PRINTED = "acdp-pfsd-faithful"
RAW_FIGURES = (
    "acdp-pfsd-raw"  # stored runs of figures in the clear with class frequencies and averaged models: ours
)
TABLE_3 = ("pfsd", "dp-pfsd", "aqc", "acdp-pfsd")
LETTER_ROWS = (*((method, "hot") for method in TABLE_3), ("dp-pfsd", ""))
FIG_4 = ("pfsd", "fedavg", "fedper", "pfedsd", "acdp-pfsd", "aqc")
VIEWS = ("secure-aggregation", "trusted-server", "server-sees-messages")
OTHERS = ("cifar-10", "svhn")
SMALL_NETWORK, LARGE_NETWORK = "cnn8", "resnet18"
BOLD = 3e-3  # an agent with random rounds and a wide spread that learns six times as fast, to see what that does
WIDE = {"random_rounds": 2, "agent_std": 0.25}
TAUGHT = "acdp-pfsd-pretrained"
PARTS = ("dp-pfsd-target-only", "dp-pfsd-non-target-only")
SAME = {  # whose settings they use: variants and ablations, and the other methods without privacy
    **dict.fromkeys(("acdp-pfsd-bold", "acdp-pfsd-faithful", TAUGHT), "acdp-pfsd"),
    **dict.fromkeys((*PARTS, "dp-pfsd-no-distillation"), "dp-pfsd"),
    **dict.fromkeys(("fedavg", "fedper", "pfedsd"), "pfsd"),
}
CLEAR = ("pfsd", "fedavg", "fedper", "pfedsd")  # no noise: σ and the bound mean nothing to them
CONSTANTS = (0.1, 0.25, 1.0, 2.0)  # beside the published bound, to find the best constant one
FACTORS = (0.1, 0.3, 3.0, 10.0)  # the same where a bound was chosen


def cells_methods(setting: str) -> tuple[str, ...]:
    """The methods that have a meaning for a setting: a head has no layers to keep personal."""
    if "-components" in setting or f"-{LETTERS}" in setting:
        return tuple(m for m in METHODS if m not in ("fedper", "acdp-pfsd-faithful"))
    return METHODS


def spec_of(cell: Cell, choice: Choice, agent: str | None) -> MethodSpec:
    """The method of a cell with its settings."""
    C = next(c for c in (cell.clip, choice.clip, TASKS[cell.task].clip) if c is not None)
    trained: dict[str, Any] = {**choice.local(cell.steps), **choice.server()}
    hidden: dict[str, Any] = {"clip": C * cell.factor, "view": cell.view, **trained}
    # δ = P^−1.1 where the noise is the paper's, whose budgets are stated for it; 1e-5 where a budget is set.
    hidden |= {"noise_multiplier": cell.sigma, "delta": None} if cell.epsilon is None else {"delta": 1e-5}
    if cell.view == "trusted-server" and cell.per_round < cell.clients:
        hidden["rate"] = cell.per_round / cell.clients
    distilling: dict[str, Any] = {"alpha": choice.alpha, "prior": choice.prior}
    printed: dict[str, Any] = {"agent_seed": cell.seed, "agent_lr": BOLD, **WIDE}
    agent_of: dict[str, Any] = {"agent_seed": cell.seed, **choice.agent}
    match cell.method:
        case "pfsd":
            return Pfsd(**trained, **distilling)
        case "pfedsd":
            return PFedSd(**trained, **distilling)
        case "fedper":
            personal = "3" if cell.network == "mlp" else "fc1,stage4_1,head"
            return FedPer(personal=personal, **trained)
        case "fedavg":
            return FedAvg(**trained, batch=64, aggregation="mean")
        case "dp-fedsam":
            return DpFedSam(**hidden, prior=choice.prior, ascent=choice.ascent)
        case "dp-pfsd":
            return DpPfsd(**hidden, **distilling)
        case "dp-pfsd-no-distillation":
            return DpPfsd(**{**hidden, **distilling, "alpha": 1.0})
        case "dp-pfsd-target-only":
            return DpPfsd(**hidden, **distilling, non_target=0.0)
        case "dp-pfsd-non-target-only":
            return DpPfsd(**hidden, **distilling, target=0.0)
        case "aqc":
            return AcdpPfsd(**hidden, **distilling, clipping="quantile")
        case "bandit":
            return AcdpPfsd(**hidden, **distilling, agent_seed=cell.seed, clipping="bandit")
        case "acdp-pfsd":
            return AcdpPfsd(**hidden, **distilling, **agent_of)
        case "acdp-pfsd-bold":
            return AcdpPfsd(**hidden, **distilling, **printed)
        case "acdp-pfsd-pretrained":
            return AcdpPfsd(**hidden, **distilling, **agent_of, agent=agent)
        case "acdp-pfsd-faithful":
            return AcdpPfsd(
                clip=C * cell.factor,
                lr=choice.local(cell.steps)["lr"],
                steps=cell.steps,
                noise_multiplier=cell.sigma,
                delta=None,
                alpha=choice.alpha,
                agent_seed=cell.seed,
                mode="faithful",
            )
    raise UserError(f"unknown method {cell.method!r}: use one of {', '.join(METHODS)}")


def first_cells() -> Iterator[Cell]:
    """EMNIST, σ = 1, s2: every method, then constant bounds, seed after seed; the agent's lessons take a while."""
    for seed in SEEDS:
        for method in METHODS[:-1]:
            yield Cell("emnist", method, seed=seed)
        for C in CONSTANTS:
            yield Cell("emnist", "dp-pfsd", seed=seed, clip=C)
    for seed in SEEDS:
        yield Cell("emnist", METHODS[-1], seed=seed)


def sigma_cells() -> Iterator[Cell]:
    """EMNIST at the other noise factors."""
    for seed in SEEDS:
        for sigma in TASKS["emnist"].sigmas[1:]:
            for method in TABLE_3[1:]:
                yield Cell("emnist", method, sigma=sigma, seed=seed)


def view_cells(model: str = "", seeds: tuple[int, ...] = SEEDS[:1]) -> Iterator[Cell]:
    """The three views, with 50 clients and with 100 of which half take part in a round; Fig. 4."""
    for seed in seeds:
        for clients in (50, 100):
            for view in VIEWS if model or clients == 100 else VIEWS[1:]:  # the network's first one is in Table 3
                yield Cell("emnist", "dp-pfsd", view=view, clients=clients, seed=seed, model=model)
        for shards in ("s1", "s2"):
            for method in FIG_4:
                if not (model and method == "fedper"):  # a head has no layers to keep personal
                    yield Cell("emnist", method, clients=100, shards=shards, seed=seed, model=model)


def head_view_cells() -> Iterator[Cell]:
    """The same on the linear head."""
    return view_cells("components", SEEDS)


def small_cells() -> Iterator[Cell]:
    """ε = 8 at δ = 1e-5, with a model that is small enough: every method that has a meaning for it."""
    small = Cell("emnist", "dp-pfsd", model="components", epsilon=8.0)
    for seed in SEEDS:
        for method in cells_methods(small.setting):
            yield replace(small, method=method, seed=seed)
        for factor in FACTORS:
            yield replace(small, factor=factor, seed=seed)


def letter_cells() -> Iterator[Cell]:
    """The same on features of rendered characters, from a head that they have taught, and from zero."""
    for seed in SEEDS:
        for method, variant in LETTER_ROWS:
            yield Cell("emnist", method, seed=seed, model=LETTERS, variant=variant, epsilon=8.0)


def plain_cells() -> Iterator[Cell]:
    """EMNIST, σ = 1, s2 without what the paper does not have: class frequencies in the loss, averaged models."""
    for seed in SEEDS:
        for method in TABLE_3:
            yield Cell("emnist", method, seed=seed, variant="plain")


def hot_cells() -> Iterator[Cell]:
    """The same with a first model from the public proxy, for every method."""
    for seed in SEEDS:
        for method in (*TABLE_3, "dp-fedsam"):
            yield Cell("emnist", method, seed=seed, variant="hot")


def other_cells(variant: str = "") -> Iterator[Cell]:
    """The other tasks at σ = 1, on a network that is small enough for the noise."""
    for seed in SEEDS:
        for task in OTHERS:
            for method in TABLE_3:
                yield Cell(task, method, seed=seed, model=SMALL_NETWORK, variant=variant)


def longer_cells() -> Iterator[Cell]:
    """The same with more local steps, which a bound on whole updates leaves to the client."""
    return other_cells(LONGER)


def other_sigma_cells() -> Iterator[Cell]:
    """The same at the other noise factors, with more local steps."""
    for seed in SEEDS:
        for task in OTHERS:
            for sigma in TASKS[task].sigmas[1:]:
                for method in TABLE_3[1:]:
                    yield Cell(task, method, sigma=sigma, seed=seed, model=SMALL_NETWORK, variant=LONGER)


def resnet_cells() -> Iterator[Cell]:
    """The private methods on the paper's ResNet-18, 11 million parameters, one seed."""
    for method in reversed(TABLE_3[1:]):
        for task in OTHERS:
            yield Cell(task, method)


def quick_cells() -> Iterator[Cell]:
    """A look at every method in small, on embedded digits. Not the paper's setting."""
    for method in METHODS[:-1]:
        yield Cell("digits", method, clients=10, per_round=10, rounds=20)


GROUPS = {
    "quick": quick_cells,
    "first": first_cells,
    "plain": plain_cells,
    "hot": hot_cells,
    "sigmas": sigma_cells,
    "small": small_cells,
    "letters": letter_cells,
    "others": other_cells,
    "longer": longer_cells,
    "views": view_cells,
    "head-views": head_view_cells,
    "other-sigmas": other_sigma_cells,
    "resnet": resnet_cells,
}
PAPER = [group for group in GROUPS if group not in ("quick", "letters")]  # these ask for nothing but datasets
