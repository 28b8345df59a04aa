"""Small tasks on which adaptive clipping could pay: unlike clients, unlike budgets, gradients that drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from modicum.core.setting import MethodSpec
from modicum.data import federate, load
from modicum.data.arrays import Dataset
from modicum.data.budgets import Budgets, assign_budgets
from modicum.data.partition import Dirichlet
from modicum.federation.experiment import Experiment, Federation, Prepared, build_method, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpSgd
from modicum.papers.pac_dp.grid import gradient_scale
from modicum_bench.fedmap.regimes import regime

CHOOSE, REPORT = range(6), range(100, 110)
PROXY = 0.2  # share of the training records that is public: the methods learn from it, schedules do not


@dataclass(frozen=True)
class Task:
    """A dataset, how it is divided, and how long it is trained: one step on all records a round."""

    name: str
    source: Callable[[], Dataset]
    model: str = "logistic"
    clients: int | None = 10
    alpha: float = 0.5  # of the Dirichlet division
    budgets: Budgets = 1.0
    rounds: int = 24

    def federation(self, seed: int) -> Federation:
        """Divided anew for each seed, its budgets dealt anew."""
        part = None if self.clients is None else Dirichlet(self.alpha)
        data = federate(self.source(), clients=self.clients, partition=part, proxy=PROXY, seed=seed)
        return Federation(data, assign_budgets(self.budgets, len(data.clients), seed))


def _first(name: str, train: int, test: int) -> Dataset:
    whole = load(name)
    return replace(whole, train=whole.train.take(slice(0, train)), test=whole.test.take(slice(0, test)))


UNLIKE = {0.3: 0.6, 1.0: 0.3, 8.0: 0.1}
TASKS = {
    t.name: t
    for t in (
        Task("digits", lambda: load("digits")),
        Task("digits, unlike budgets", lambda: load("digits"), budgets=UNLIKE),
        Task("digits, unlike clients", lambda: load("digits"), alpha=0.1, budgets=3.0),
        Task("heart disease", lambda: load("heart-disease"), clients=None, budgets=0.5),
        Task("features (scattering)", lambda: _first("mnist", 4000, 2000), model="scattering", budgets=2.0),
        Task("shrinking gradients", lambda: regime("decaying"), budgets=0.1),
        Task("rare large gradients", lambda: regime("aligned"), budgets=2.0),
        Task("digits, CNN from scratch", lambda: load("digits"), model="cnn-small", budgets=8.0, rounds=30),
    )
}


@lru_cache(maxsize=32)
def staged(name: str, seed: int) -> tuple[Federation, Prepared]:
    """A division and its tensors, which all runs on it share."""
    task = TASKS[name]
    federation = task.federation(seed)
    asked = experiment(task, federation, DpSgd(steps=1), seed)
    return federation, prepare(asked, build_method(asked))


def experiment(task: Task, federation: Federation, method: MethodSpec, seed: int) -> Experiment:
    """A run of the task."""
    return Experiment(
        federation=federation,
        method=method,
        model=task.model,
        rounds=task.rounds,
        seed=seed,
        evaluate_every=task.rounds,
    )


def scale(name: str) -> float:
    """Median norm of a public record's gradient at the first model: the unit of bounds."""
    return gradient_scale(staged(name, CHOOSE[0])[1])


def play(name: str, method: MethodSpec, seed: int) -> tuple[float, float]:
    """Accuracy and loss on the test records at the end."""
    federation, prepared = staged(name, seed)
    run = Rehearsal(experiment(TASKS[name], federation, method, seed), prepared)
    last = list(run.rounds())[-1].simulated
    return last["test_accuracy"], min(last["test_loss"], 1e9)
