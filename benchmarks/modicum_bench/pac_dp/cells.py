"""One run of the benchmark, on a stand-in federation of public records or on the real one, in any process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from modicum.comparing.workers import players
from modicum.core.setting import MethodSpec
from modicum.data.arrays import FederatedData
from modicum.errors import UserError
from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, Federation, Prepared, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.models.frozen import FixedFeatures
from modicum.papers.pac_dp.grid import gradient_scale, run_cell
from modicum.privacy.accounting import epsilon
from modicum.public.proxy import bootstrap
from modicum_bench.pac_dp.data import Folders, budgets, divided, first_model, without_private
from modicum_bench.pac_dp.settings import TASKS, Case

Found = dict[str, Any]
Progress = Callable[[int, int], None]
Runner = Callable[[Callable[["Workspace", Any], Found], Sequence[Any]], Iterator[Found]]
KEPT = 8  # prepared federations that a process holds


@dataclass(frozen=True)
class Cell:
    """What decides a run, beside the records."""

    task: str
    method: MethodSpec
    features: str
    hot: bool
    rounds: int
    case: Case | float
    seed: int
    per_round: int | None = None


@dataclass(frozen=True)
class Workspace:
    """Where a process finds things and computes."""

    folders: Folders
    device: str = "cpu"


def judged(place: Workspace, cell: Cell) -> Found:
    """Accuracy and loss on public records, from the cache where known; `refused` where a budget is not met."""
    stand_in = _stand_in(cell.task, place.folders, cell.seed)
    try:
        experiment = _experiment(place, cell, stand_in, _judged_model(cell.task, place.folders, cell), cell.seed)
        prepared = _prepared(place, cell, experiment, public=True)
        known = None if getattr(cell.method, "curve", None) else place.folders.cache / "cells"  # a file may change
        return {**run_cell(experiment, prepared, known)}
    except UserError as error:
        return {"refused": str(error)}


def scale(place: Workspace, cell: Cell) -> float:
    """The median public gradient at the first model of a stand-in federation."""
    stand_in = _stand_in(cell.task, place.folders, cell.seed)
    experiment = _experiment(place, cell, stand_in, _judged_model(cell.task, place.folders, cell), cell.seed)
    return gradient_scale(_prepared(place, cell, experiment, public=True))


def tested(place: Workspace, cell: Cell) -> Found:
    """Accuracy by rounds on test records, and the true ε of the clients."""
    task = TASKS[cell.task]
    data = divided(task, place.folders, cell.seed)
    model = _tested_model(cell.task, place.folders, cell.features, cell.hot)
    experiment = _experiment(place, cell, data, model, 1000 + cell.seed)  # none of the seeds of the choice
    try:
        run = Rehearsal(experiment, _prepared(place, cell, experiment, public=False))
    except UserError as error:
        return {"accuracy": None, "reason": str(error)}
    first = evaluate(run.backend, run.data.first, run.data.test)["accuracy"]
    rounds = list(run.rounds())
    true = sorted(epsilon(list(p.releases), p.spec).epsilon for p in _different(run).values() if p.releases)
    by_round = [r.simulated["test_accuracy"] for r in rounds]
    return {
        "accuracy": by_round[-1],
        "first": first,
        "by_round": by_round,
        "bound": rounds[0].bound,
        "granted": sorted({f.budget for f in run.facts.values()}),
        "epsilon": [true[0], statistics.median(true), true[-1]] if true else None,
    }


def _different(run: Rehearsal) -> dict[Any, Any]:
    """One plan for each kind of client: those with equal budgets and sizes cost the same."""
    return {(p.budget, tuple(p.releases)): p for p in run.plans.values()}


def _experiment(place: Workspace, cell: Cell, data: FederatedData, model: FixedFeatures, seed: int) -> Experiment:
    granted = budgets(TASKS[cell.task], cell.case, len(data.clients), cell.seed)
    return Experiment(
        federation=Federation(data, granted),
        method=cell.method,
        model=model,
        rounds=cell.rounds,
        per_round=cell.per_round,
        seed=seed,
        evaluate_every=cell.rounds if seed == cell.seed else 1,
        device=place.device,
    )


@lru_cache(maxsize=64)
def _stand_in(task: str, folders: Folders, seed: int) -> FederatedData:
    return bootstrap(without_private(divided(TASKS[task], folders)), seed, TASKS[task].parts)


def _judged_model(task: str, folders: Folders, cell: Cell) -> FixedFeatures:
    return _public_model(task, folders, cell.features, cell.hot, cell.seed)


@lru_cache(maxsize=256)
def _public_model(task: str, folders: Folders, features: str, hot: bool, seed: int) -> FixedFeatures:
    return first_model(_stand_in(task, folders, seed), features, hot=hot)


@lru_cache(maxsize=8)
def _tested_model(task: str, folders: Folders, features: str, hot: bool) -> FixedFeatures:
    """The public records are the same in every draw, so the first model is too."""
    return first_model(without_private(divided(TASKS[task], folders)), features, hot=hot)


_PREPARED: dict[tuple[Any, ...], Prepared] = {}


def _prepared(place: Workspace, cell: Cell, experiment: Experiment, *, public: bool) -> Prepared:
    key = (place, cell.task, cell.features, cell.hot, cell.seed, public)
    if key not in _PREPARED:
        while len(_PREPARED) >= KEPT:
            _PREPARED.pop(next(iter(_PREPARED)))
        _PREPARED[key] = prepare(experiment, experiment.method.build(experiment.setting))
    return _PREPARED[key]


@contextmanager
def runner(place: Workspace, workers: int, progress: Progress | None = None) -> Iterator[Runner]:
    """Runs lists of cells here, or in as many processes, each with one thread; `progress` after each of a list.

    Results come one by one, in the order of the cells.
    """
    with players(workers, chunks=4) as play:
        yield lambda function, cells: play(partial(function, place), cells, progress=progress)
