"""Plays one cell and says what came out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from modicum.bench.acdp_pfsd.cells import BUDGET, CLEAR, TASKS, Cell, Choice, spec_of
from modicum.bench.acdp_pfsd.small import with_components, with_features
from modicum.data import Arrays, Dataset, FederatedData, Shards, federate, load
from modicum.federation.experiment import Experiment, Federation, Prepared, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.privacy.budgets import plan_guarantee
from modicum.privacy.plan import Guard

VALIDATION, TEST, PROXY = 0.1, 0.2, 0.05


@dataclass
class Bench:
    """Datasets and prepared tensors that cells share."""

    device: str = "cpu"
    data_dir: str | None = None
    agent: Path | None = None
    evaluate_every: int = 10
    records: int | None = None  # at most so many training records: for a quick look
    _datasets: dict[str, Dataset] = field(default_factory=dict)
    _data: dict[object, FederatedData] = field(default_factory=dict)
    _prepared: dict[object, Prepared] = field(default_factory=dict)

    def dataset(self, task: str) -> Dataset:
        if task not in self._datasets:
            found = capped(load(TASKS[task].data, self.data_dir), TASKS[task].cap)
            if self.records is not None:
                found = replace(found, train=some(found.train, self.records), test=some(found.test, self.records))
            self._datasets[task] = found
        return self._datasets[task]

    def federated(self, cell: Cell) -> FederatedData:
        key = (cell.task, cell.shards, cell.clients, cell.seed, cell.model)
        if key not in self._data:
            self._data.clear()  # one partition at a time is enough
            self._prepared.clear()
            data = federate(
                self.dataset(cell.task),
                clients=cell.clients,
                partition=Shards(TASKS[cell.task].shards[cell.shards]),
                seed=cell.seed,
                validation=VALIDATION,
                test=TEST,
                proxy=PROXY,
            )
            if cell.model == "features":
                data = with_features(data, cell.seed, self.device)
            elif cell.model == "components":
                data = with_components(data, self.device)
            self._data[key] = data
        return self._data[key]

    def experiment(self, cell: Cell, choice: Choice) -> Experiment:
        budget = BUDGET if cell.epsilon is None else cell.epsilon
        data = self.federated(cell)
        agent = None if self.agent is None else str(self.agent)
        return Experiment(
            federation=Federation(data, (budget,) * cell.clients),
            method=spec_of(cell, choice, agent),
            model=cell.network,
            rounds=cell.rounds,
            per_round=cell.per_round,
            seed=cell.seed,
            evaluate_every=self.evaluate_every,
            device=self.device,
            model_options=dict(choice.options),
        )

    def play(self, cell: Cell, choice: Choice) -> dict[str, Any]:
        begun = time.monotonic()
        experiment = self.experiment(cell, choice)
        key = (id(experiment.federation.data), experiment.model, tuple(sorted(choice.options.items())))
        if key not in self._prepared:
            self._prepared[key] = prepare(experiment, experiment.method.build(experiment.setting))
        run = Rehearsal(experiment, self._prepared[key])
        rounds = list(run.rounds())
        last = rounds[-1].simulated
        return {
            "cell": cell.to_dict(),
            "name": cell.name,
            "personalised": last["personalised_accuracy"],
            "global": last["test_accuracy"],
            "validation": last["validation_accuracy"],
            "public": rounds[-1].public["accuracy"],
            "epsilon": guarantee(run, cell),
            "parameters": int(run.frame.shared.sum()),
            "note": experiment.federation.data.note,
            "seconds": round(time.monotonic() - begun, 2),
            "bounds": [round(r.bound, 5) for r in rounds],
            "norms": [round(r.norm, 5) for r in rounds],
            "public_curve": [round(r.public["accuracy"], 4) for r in rounds],
            "curve": {
                r.round + 1: [
                    round(r.simulated["personalised_accuracy"], 4),
                    round(r.simulated["test_accuracy"], 4),
                ]
                for r in rounds
                if r.simulated
            },
        }


def guarantee(run: Rehearsal, cell: Cell) -> float | None:
    """The tight ε of the run's plans, the largest over clients; None where it is infinite."""
    plans = list(run.plans.values())
    if cell.method in CLEAR or any(plan.guard is Guard.NONE for plan in plans):
        return None
    distinct = {(p.releases, p.spec): p for p in plans}.values()
    largest = max(plan_guarantee(p).epsilon for p in distinct)
    return largest if math.isfinite(largest) else None


def capped(dataset: Dataset, cap: int | None) -> Dataset:
    """At most `cap` training records of each class, the first ones in the file."""
    if cap is None:
        return dataset
    y = dataset.train.y
    keep = np.sort(np.concatenate([np.flatnonzero(y == c)[:cap] for c in range(dataset.classes)]))
    note = f"{len(keep):,} training records, at most {cap:,} a class"
    return replace(dataset, train=dataset.train.take(keep), note="; ".join(filter(None, [dataset.note, note])))


def some(arrays: Arrays, count: int) -> Arrays:
    """About `count` records, evenly spread over the file."""
    return arrays.take(slice(None, None, max(1, len(arrays) // count)))
