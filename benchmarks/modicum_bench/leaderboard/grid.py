"""What is compared: tasks with budgets from tight to loose, a balanced fraction of all cells, and the methods."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from modicum.core.facts import noise_of_sum
from modicum.core.setting import MethodSpec, Setting
from modicum.errors import UserError
from modicum.federation.experiment import Federation
from modicum.methods import METHODS, Auto, method
from modicum.models.published.packages import is_name
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.spec import PrivacySpec

Budget = float | tuple[float, ...]
MESSAGES, SUM = "server-sees-messages", "secure-aggregation"
ROUNDS = 30
PUBLIC = 0.05  # share of a task's records that is public in hot cells
PATIENTS, JUDGED = 920, 184  # of Heart Disease: all of them, and those that a draw is judged on
FEATURES, WHOLE = "discriminant:auto", "discriminant:1280"  # as many dimensions as pay, or all of a network's
MOMENTUM = 0.5  # of the server, for every method that has one


@dataclass(frozen=True)
class Task:
    """A dataset, three budgets from tight to loose, and the public records that its features come from."""

    name: str
    budgets: tuple[float, float, float]
    source: str | None = None  # a public dataset with other records, which features are fitted to
    backbone: str | None = None  # trained on those
    most: int | None = None  # training records that are used, of the source too; None: all
    few: int | None = None  # records of the source that go through the backbone; None: all
    clients: tuple[int, int] = (50, 10)
    shifted: bool = False  # whether classes have other shares in the test than at clients
    features: str = FEATURES

    @property
    def key(self) -> str:
        """Names the task in cells: with its network where that is a published one."""
        dimensions = "" if self.features == FEATURES else f", {self.features}"
        published = self.backbone is not None and is_name(self.backbone)
        return f"{self.name} on {self.backbone}{dimensions}" if published else self.name


NETWORK, SMALLER = "efficientnet-lite2", "efficientnet-lite0"
TASKS = {
    task.key: task
    for task in (
        Task("cifar-10", (0.5, 1.0, 5.0), "cifar-100", "cifar-100.npz"),
        Task("mnist", (0.05, 0.1, 1.0), "emnist-merge47:10-46", "emnist-letters.npz"),
        Task("heart-disease", (0.1, 0.5, 2.0), clients=(4, 4)),
        Task("svhn", (0.5, 1.0, 5.0), "rendered", "house-numbers.npz"),
        Task("cifar-100", (3.0, 5.0, 10.0), "cifar-10", "cifar-10-group.npz", few=1_500),
        Task("fashion-mnist", (0.1, 0.5, 2.0), "emnist-merge47:10-46", "emnist-letters.npz", most=30_000),
        Task("emnist-merge47:10-46", (0.5, 1.0, 5.0), "mnist", most=20_000, shifted=True),
        Task("digits", (0.5, 2.0, 5.0), clients=(20, 20)),
        Task("cifar-10", (0.5, 1.0, 5.0), "cifar-100", NETWORK),
        Task("cifar-10", (0.5, 1.0, 5.0), "cifar-100", SMALLER),
        Task("cifar-100", (3.0, 5.0, 10.0), "cifar-10", NETWORK, few=20_000),
        Task("cifar-100", (3.0, 5.0, 10.0), "cifar-10", NETWORK, few=20_000, features=WHOLE),
        Task("fashion-mnist", (0.1, 0.5, 2.0), "emnist-merge47:10-46", NETWORK, most=30_000),
        Task("emnist-merge47:10-46", (0.5, 1.0, 5.0), "mnist", NETWORK, most=20_000, few=20_000, shifted=True),
        Task(
            "emnist-merge47:10-46",
            (0.5, 1.0, 5.0),
            "mnist",
            NETWORK,
            most=20_000,
            few=20_000,
            shifted=True,
            features=WHOLE,
        ),
        Task("svhn", (0.5, 1.0, 5.0), "mnist", NETWORK, few=20_000),
    )
}


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    task: str
    clients: int
    budget: Budget  # several: in turn, one a client
    hot: bool = False
    view: str = MESSAGES

    @property
    def _granted(self) -> str:
        return "/".join(f"{b:g}" for b in self.budget) if isinstance(self.budget, tuple) else f"{self.budget:g}"

    @property
    def name(self) -> str:
        """The key of its results in files."""
        seen = ", sum" if self.view == SUM else ""
        return f"{self.task}, {self.clients}, ε = {self._granted}, {'hot' if self.hot else 'cold'}{seen}"

    @property
    def title(self) -> str:
        """What pages call it."""
        labels = f"{PUBLIC:.0%} public labels" if self.hot else "no public label"
        seen = ", secure aggregation" if self.view == SUM else ""
        return f"{self.task}, {self.clients} clients, ε = {self._granted}, {labels}{seen}"

    @property
    def smallest(self) -> float:
        return min(self.budget) if isinstance(self.budget, tuple) else self.budget

    @property
    def seeds(self) -> int:
        """Small test sets need many draws."""
        return {"digits": 10, "heart-disease": 60}.get(self.task, 3)

    @property
    def dealt(self) -> bool:
        """Whether every draw deals all records anew into training and test."""
        return self.task == "heart-disease"


def fraction(task: Task, place: int) -> list[Cell]:
    """Eight of a task's 32 cells: each budget cold and hot, every pair of factors in balance.

    With a budget's number b₁b₀ in binary and s for hot, s⊕b₁ decides the number of clients and s⊕b₀ the view
    (an orthogonal array of strength 2: Rao 1947). The bits of `place` exchange both, so that tasks differ.
    """
    levels: list[Budget] = [*task.budgets, task.budgets]
    return [
        Cell(
            task.key,
            task.clients[hot ^ (b >> 1) ^ (place & 1)],
            levels[b],
            bool(hot),
            (MESSAGES, SUM)[hot ^ (b & 1) ^ (place >> 1 & 1)],
        )
        for hot in (1, 0)
        for b in (1, 2, 0, 3)
    ]


def unique(*cells: Cell) -> tuple[Cell, ...]:
    return tuple(dict.fromkeys(cells))


SEVEN = tuple(key for key, task in TASKS.items() if key == task.name != "digits")
FRACTION = unique(*itertools.chain(*(fraction(TASKS[name], i) for i, name in enumerate(SEVEN))))
HEADLINES = (  # what the README's table shows
    *(Cell("cifar-10", 50, e, hot=True) for e in (1.0, 5.0, (0.5, 1.0, 5.0))),
    Cell("cifar-10", 10, 8.0, hot=True),
    Cell("cifar-10", 50, 1.0, hot=True, view=SUM),
    *(Cell("cifar-10", 50, e) for e in (0.5, 1.0, 5.0)),
    *(Cell("mnist", 50, e) for e in (0.05, 0.1, 1.0)),
)
QUICK = unique(
    *fraction(TASKS["digits"], 0),
    *fraction(TASKS["heart-disease"], SEVEN.index("heart-disease")),
    *(Cell("mnist", 50, e) for e in (0.05, 1.0)),
    Cell("mnist", 50, 0.1, hot=True),
)
PRESETS = {"quick": QUICK, "paper": unique(*FRACTION, *HEADLINES)}


@dataclass(frozen=True)
class Row:
    """A method with what is fixed; `tuned` ones have a rate and a bound that are chosen on public records."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    tuned: bool = True
    steps: int = 1  # releases a round
    gain: float = 1 / (1 - MOMENTUM)  # how far a step gets in the end

    @property
    def rounds(self) -> int:
        return ROUNDS // self.steps


ROWS: dict[str, Row] = {
    "auto": Row(tuned=False),
    "class-means": Row(tuned=False),
    "dp-sgd": Row(),
    "aqc": Row(),
    "cgm-median": Row(),
    "pac-dp": Row(),
    "rpdp-fl": Row({"aggregation": "noise-aware"}),
    "nbafl": Row({"batch": 256, "steps": 4}),
    "fedcompdp": Row(gain=1.0),
    "dp-fedsam-record": Row(steps=2),
    "dp-acdn": Row(),
    "fedacg": Row(gain=1 / (1 - 0.85)),
    "fedsa": Row(),
    "fedmap": Row({"clipping": "plug-in"}),
    "awdp-fl": Row(),
}
SAME_AS = {"rpdp-fl": "dp-sgd", "fedsa": "dp-sgd"}  # one method where all clients have one budget and size
Choice = tuple[float, float]
CHOICES: tuple[Choice, ...] = tuple(itertools.product((0.1, 0.3, 1.0, 3.0), (0.3, 1.0)))  # rate, bound


def alike(federation: Federation) -> bool:
    """Whether all clients have one budget and as many records."""
    return len(set(federation.budgets)) == len(set(federation.data.sizes)) == 1


def spec_of(clients: int, view: str) -> PrivacySpec:
    """What every method of a cell promises."""
    return Auto(view=view).build(Setting(clients, clients, ROUNDS)).mechanism.spec  # type: ignore[arg-type]


def noise_of(federation: Federation, view: str, releases: int = 1) -> float:
    """Noise over bound in the mean over all records, of one of so many releases that spend everything."""
    spec, sizes = spec_of(len(federation.budgets), view), federation.data.sizes
    known = {b: calibrate_noise(spec, b, NoSampling(), releases) for b in set(federation.budgets)}
    noises = [known[b] for b in federation.budgets]
    if view == SUM:
        return noise_of_sum(noises, sizes)
    return 1 / math.hypot(*(n / z for n, z in zip(sizes, noises, strict=True)))


def made(name: str, choice: Choice, federation: Federation, view: str) -> MethodSpec:
    """The method whose steps together leave noise `rate` in a logit, for records of length 1."""
    row, (rate, clip) = ROWS[name], choice
    known = {f.name for f in fields(METHODS[name])}  # type: ignore[arg-type]
    settings = dict(row.settings)
    if "view" in known:
        settings["view"] = view
    elif view != MESSAGES:
        raise UserError(f"{name} has no sums: each of its messages is seen")
    if not row.tuned:
        return method(name, **settings)
    if row.gain == 1 / (1 - MOMENTUM):
        settings["server_momentum"] = MOMENTUM
    if name == "nbafl":
        return method(name, clip=_whole_update(rate, federation) / row.gain, lr=10 * clip, **settings)
    if name == "fedcompdp" and not len(federation.data.proxy):
        settings["cra"] = False  # its weights follow losses on public records of the task
    if name == "rpdp-fl":
        settings["full_budget"] = max(federation.budgets)
    noise = noise_of(federation, view, ROUNDS)
    lr = rate / (clip * noise * math.sqrt(ROUNDS) * row.gain)
    return method(name, lr=lr, clip=clip, **{"steps": row.steps, **settings})


def _whole_update(rate: float, federation: Federation) -> float:
    """NbAFL's bound: noise of 2C·z in each client's update, averaged over clients, over all rounds together."""
    spec = spec_of(len(federation.budgets), MESSAGES)
    noises = [calibrate_noise(spec, b, NoSampling(), ROUNDS) for b in federation.budgets]
    return rate * len(noises) / (2 * math.hypot(*noises) * math.sqrt(ROUNDS))
