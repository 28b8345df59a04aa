"""The tasks, and a stand-in for each that is made of public records alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Arrays, ClientData, Dataset, FederatedData
from modicum.data.budgets import Budgets
from modicum.data.fetch import data_folder
from modicum.federation.experiment import Federation
from modicum.privacy.spec import PrivacySpec, Unit
from modicum.public.features import behind, stand_on

SPEC = PrivacySpec(unit=Unit.RECORD)
STAND_IN_CLASSES = 10


@dataclass(frozen=True)
class Task:
    """A private dataset, a public one with other labels, and a backbone that was trained on the public one."""

    name: str
    proxy: str
    backbone: Path


@lru_cache(maxsize=1)
def datasets(task: Task) -> tuple[Dataset, Dataset]:
    cache = data_folder() / "features"
    private, _, public = behind(task.backbone, cache, load(task.name), False, load(task.proxy))
    assert public is not None
    return private, public


def private(task: Task, clients: int, budget: Budgets, features: str, hot: bool, seed: int) -> Federation:
    """The task itself; hot: with 5% of its records public, all of which may be learned from."""
    records, source = datasets(task)
    data = federate(records, clients=clients, proxy=0.05 if hot else False, proxy_validation=0.0, seed=seed)
    return _on(data, source, clients, budget, features, task)


def stand_in(task: Task, clients: int, budget: float, features: str, hot: bool, seed: int) -> Federation:
    """Ten public classes as the task, the others to fit features to; clients draw records with replacement.

    Sizes, budgets and noise are those of the task. A quarter of the classes' records judges.
    """
    records, public = datasets(task)
    rng = np.random.default_rng([seed, 0x57A1D])
    chosen = np.sort(rng.choice(public.classes, STAND_IN_CLASSES, replace=False))
    rest = [c for c in range(public.classes) if c not in chosen]
    task_of, source = public.only(chosen.tolist()), public.only(rest)
    rows = rng.permutation(len(task_of.train))
    held = len(rows) // 4
    pool, test = task_of.train.take(rows[held:]), task_of.train.take(rows[:held])
    known = min(len(pool) // 2, round(0.05 * len(records.train))) if hot else 0
    labelled, pool = pool.take(slice(0, known)), pool.take(slice(known, None))
    nobody = Arrays.empty(pool)
    size = (len(records.train) - (round(0.05 * len(records.train)) if hot else 0)) // clients
    own = tuple(
        ClientData(f"client-{i:02d}", pool.take(rng.integers(0, len(pool), size)), nobody, nobody)
        for i in range(clients)
    )
    data = FederatedData(
        task.proxy, own, test, STAND_IN_CLASSES, labelled, nobody, STAND_IN_CLASSES if hot else 0, "public records"
    )
    return _on(data, source, clients, budget, features, task)


def _on(
    data: FederatedData, source: Dataset, clients: int, budget: Budgets, features: str, task: Task
) -> Federation:
    budgets = assign_budgets(budget, clients)
    return Federation(stand_on(data, features, budgets, lambda: SPEC, source, task.backbone), budgets)
