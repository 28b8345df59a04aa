"""The tasks, and a stand-in for each that is made of public records alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Dataset, FederatedData
from modicum.data.budgets import Budgets
from modicum.data.fetch import data_folder
from modicum.federation.experiment import Federation
from modicum.privacy.spec import PrivacySpec, Unit
from modicum.public.features import behind, stand_on
from modicum_bench.stand_in import stood_in

SPEC = PrivacySpec(unit=Unit.RECORD)


@dataclass(frozen=True)
class Task:
    """A private dataset, a public one with other labels, and a backbone that was trained on the public one."""

    name: str
    proxy: str
    backbone: Path


@lru_cache(maxsize=1)
def datasets(task: Task) -> tuple[Dataset, Dataset]:
    cache = data_folder() / "features"
    known = (task.proxy,)
    private, _, public = behind(task.backbone, cache, load(task.name), False, load(task.proxy), trained_on=known)
    assert public is not None
    return private, public


def private(task: Task, clients: int, budget: Budgets, features: str, hot: bool, seed: int) -> Federation:
    """The task itself; hot: with 5% of its records public, all of which may be learned from."""
    records, source = datasets(task)
    data = federate(records, clients=clients, proxy=0.05 if hot else False, proxy_validation=0.0, seed=seed)
    return _on(data, source, clients, budget, features)


def stand_in(task: Task, clients: int, budget: float, features: str, hot: bool, seed: int) -> Federation:
    """Ten public classes as the task, the others to fit features to; clients draw records with replacement.

    Sizes, budgets and noise are those of the task. A quarter of the classes' records judges.
    """
    records, public = datasets(task)
    known = round(0.05 * len(records.train)) if hot else 0
    size = (len(records.train) - known) // clients
    data, source = stood_in(public, seed, clients=clients, records=size, known=known, part=2)
    return _on(replace(data, dataset=task.proxy), source, clients, budget, features)


def _on(data: FederatedData, source: Dataset, clients: int, budget: Budgets, features: str) -> Federation:
    budgets = assign_budgets(budget, clients)
    return Federation(stand_on(data, features, budgets, lambda: SPEC, source), budgets)
