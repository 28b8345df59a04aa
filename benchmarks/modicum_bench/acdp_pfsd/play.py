"""Plays one cell and says what came out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modicum.core.optimisers import Sgd
from modicum.data import Arrays, Dataset, FederatedData, Shards, federate, load
from modicum.data.mapped import federation_behind
from modicum.federation.evaluation import evaluate, own_model, score_by_client
from modicum.federation.experiment import Experiment, Federation, Prepared, prepare
from modicum.federation.rehearsal import Rehearsal, Rehearsed
from modicum.papers.acdp_pfsd.fine_tuning import fine_tune
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.plan import Guard
from modicum_bench.acdp_pfsd.cells import AS_PRINTED, BUDGET, CLEAR, LETTERS, TASKS, Cell, Choice, spec_of
from modicum_bench.acdp_pfsd.small import behind_letters, rendered, with_components, with_features
from modicum_bench.acdp_pfsd.together import rounds_together

VALIDATION, TEST, PROXY = 0.1, 0.2, 0.05
KEPT = 6  # partitions in memory
TUNING, TUNING_MOMENTUM = 50, 0.9  # further local steps, which cost no privacy


@dataclass
class Bench:
    """Datasets and prepared tensors that cells share."""

    device: str = "cpu"
    data_dir: str | None = None
    agents: Path | None = None  # folder of pretrained agents
    evaluate_every: int = 10
    records: int | None = None  # at most so many training records: for a quick look
    backbones: Path | None = None  # folder of what rendered characters have taught
    _datasets: dict[str, Dataset] = field(default_factory=dict)
    _heads: dict[str, nn.Module] = field(default_factory=dict)
    _data: dict[object, FederatedData] = field(default_factory=dict)
    _prepared: dict[object, Prepared] = field(default_factory=dict)

    def dataset(self, cell: Cell) -> Dataset:
        task = TASKS[cell.task]
        key = f"{cell.task}-{cell.model}" if cell.model == LETTERS else cell.task
        if key not in self._datasets:
            found = capped(load(task.data, self.data_dir), task.cap)
            if self.records is not None:
                found = replace(found, train=some(found.train, self.records), test=some(found.test, self.records))
            if cell.model == LETTERS:
                found = behind_letters(found, self.backbones or Path(), self.device)
            self._datasets[key] = found
        return self._datasets[key]

    def federated(self, cell: Cell) -> FederatedData:
        key = (cell.task, cell.shards, cell.clients, cell.seed, cell.model)
        if key not in self._data:
            if len(self._data) >= KEPT:
                self._data.clear()
                self._prepared.clear()
            data = federate(
                self.dataset(cell),
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
            elif cell.model == LETTERS:
                data = federation_behind(rendered(self.backbones or Path()).geometry, data)
            self._data[key] = data
        return self._data[key]

    def experiment(self, cell: Cell, choice: Choice) -> Experiment:
        budget = BUDGET if cell.epsilon is None else cell.epsilon
        return Experiment(
            federation=Federation(self.federated(cell), (budget,) * cell.clients),
            method=spec_of(cell, choice, str(agent_path(self.agents or Path(), cell))),
            model=self._model(cell),
            rounds=cell.rounds,
            per_round=cell.per_round,
            seed=cell.seed,
            hot_start=cell.hot_start,
            average=0.0 if cell.method == AS_PRINTED else choice.average,
            evaluate_every=self.evaluate_every,
            device=self.device,
            model_options=dict(choice.options),
        )

    def _model(self, cell: Cell) -> str | nn.Module:
        if cell.model != LETTERS:
            return cell.network
        if cell.variant not in self._heads:
            self._heads[cell.variant] = rendered(self.backbones or Path()).first_model(hot=cell.variant == "hot")
        return self._heads[cell.variant]

    def rehearsal(self, experiment: Experiment) -> Rehearsal:
        options = tuple(sorted(experiment.model_options.items()))
        key = (id(experiment.federation.data), experiment.model, options, experiment.hot_start)
        if key not in self._prepared:
            self._prepared[key] = prepare(experiment, experiment.method.build(experiment.setting))
        return Rehearsal(experiment, self._prepared[key])

    def play(self, cell: Cell, choice: Choice) -> dict[str, Any]:
        return next(self.play_together([(cell, choice)]))

    def play_together(self, items: Sequence[tuple[Cell, Choice]]) -> Iterator[dict[str, Any]]:
        """Cells whose clients train alike, as one stack."""
        begun = time.monotonic()
        runs = [self.rehearsal(self.experiment(cell, choice)) for cell, choice in items]
        rounds = list(zip(*rounds_together(runs), strict=True))
        extras = zip(fine_tuned(runs, [choice for _, choice in items]), map(shared, runs), strict=True)
        seconds = (time.monotonic() - begun) / len(runs)
        for (cell, _), run, own, (tuned, on_own) in zip(items, runs, rounds, extras, strict=True):
            yield {**row(cell, run, own), **tuned, "global_own": on_own, "seconds": round(seconds, 2)}


def agent_path(folder: Path, cell: Cell) -> Path:
    """Where the agent stands that was taught for a cell's setting."""
    return folder / f"agent-{cell.setting}.json"


def row(cell: Cell, run: Rehearsal, rounds: Sequence[Rehearsed]) -> dict[str, Any]:
    """What came out of a run."""
    last = rounds[-1].simulated
    return {
        "cell": cell.to_dict(),
        "name": cell.name,
        "personalised": last["personalised_accuracy"],
        "global": last["test_accuracy"],
        "first": evaluate(run.backend, run.data.first, run.data.test)["accuracy"],
        "validation": last["validation_accuracy"],
        "public": rounds[-1].public["accuracy"],
        "epsilon": guarantee(run, cell),
        "parameters": int(run.kit.shared.sum()),
        "note": run.experiment.federation.data.note,
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


def shared(run: Rehearsal) -> float:
    """The server's model on each client's own test records, whose classes come as often as in training."""
    models = dict.fromkeys(run.states, run.model)
    return statistics.fmean(score_by_client(run.backend, models, run.data.client_test).values())


def fine_tuned(runs: Sequence[Rehearsal], choices: Sequence[Choice]) -> list[dict[str, float]]:
    """Accuracy of the clients' own models after further local steps, on test and on validation records."""
    own = [own_model(run.model, run.kit.shared, state) for run in runs for state in run.states.values()]
    records = [batch for run in runs for batch in run.data.records]
    rate = {choice.tuning_lr for choice in choices}.pop()  # the same for all that are played together
    optimiser = Sgd(rate, TUNING_MOMENTUM)
    tuned = iter(fine_tune(runs[0].backend, torch.stack(own), records, optimiser, steps=TUNING))
    return [_accuracies(run, {name: next(tuned) for name in run.states}) for run in runs]


def _accuracies(run: Rehearsal, models: Mapping[str, Tensor]) -> dict[str, float]:
    return {
        name: statistics.fmean(score_by_client(run.backend, models, held_out).values())
        for name, held_out in (("tuned", run.data.client_test), ("tuned_validation", run.data.validation))
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
