"""The block without public records in training: no proxy's features, no hot start, no centre.

A learning rate stands here, or comes from a federation of the task's sizes that is filled with other public
images; it is written down before any test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from modicum.core.setting import MethodSpec
from modicum.data import federate
from modicum.data.arrays import FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation, Prepared, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpSgd, PacDp
from modicum.models.frozen import FixedFeatures, UnitNorm
from modicum.public.proxy import bootstrap
from modicum_bench.pac_dp.cells import Found, Runner, Workspace
from modicum_bench.pac_dp.data import SCATTERING, budgets, dataset, without_private
from modicum_bench.pac_dp.settings import CASES, TASKS, Case

Say = Callable[[str], None]
RATES = (3.16, 10.0, 31.6, 100.0, 316.0)
ROWS = ("AUTO-S", "PAC-DP, C=1")
TUNING_SEEDS = (0,)


@dataclass(frozen=True)
class Cell:
    """One model on one task, for both rows and both cases."""

    name: str
    task: str
    model: str  # "pixels", "scattering" or a model's name
    stand_in: str | None = None  # whose images the rate is chosen with; none: `lr` stands
    lr: float | None = None
    rounds: int = 20
    seeds: int = 3
    batch: int | None = None
    steps: int | None = None

    @property
    def linear(self) -> bool:
        return self.model in ("pixels", SCATTERING)

    def method(self, row: str, lr: float) -> MethodSpec:
        """AUTO-S with noise-aware weights, or PAC-DP's schedule with C = 1: there is nothing to fit F to."""
        if row == "AUTO-S":
            return DpSgd(rule="auto", lr=lr, batch=self.batch, steps=self.steps)
        return PacDp(clip=1.0, lr=lr, batch=self.batch, steps=self.steps)


CLOTHES, THINGS = "fashion-mnist", "cifar-100:0-9"  # ten classes, like the tasks, each with as many records
CELLS = {
    cell.name: cell
    for cell in (
        Cell("mnist-pixels", "mnist", "pixels", CLOTHES),
        Cell("mnist-scattering", "mnist", SCATTERING, CLOTHES),
        Cell("cifar-10-pixels", "cifar-10", "pixels", THINGS),
        Cell("cifar-10-scattering", "cifar-10", SCATTERING, lr=100.0),
        Cell("cifar-10-resnet18", "cifar-10", "resnet18", lr=0.5, batch=128, steps=1),
    )
}


class Runs:
    """Runs of one cell on the same records."""

    def __init__(self, cell: Cell, data: FederatedData, device: str, first_seed: int = 1000) -> None:
        self.cell, self.data, self.device, self.first_seed = cell, data, device, first_seed
        self._prepared: Prepared | None = None

    def accuracies(self, row: str, case: Case, lr: float, seed: int, every: int | None = None) -> Iterator[float]:
        """Accuracy on the test records, `every` so many rounds and at the end."""
        cell, data = self.cell, self.data
        method = cell.method(row, lr)
        experiment = Experiment(
            federation=Federation(data, budgets(TASKS[cell.task], case, len(data.clients), seed)),
            method=method,
            model=FixedFeatures(UnitNorm(), math.prod(data.input_shape), data.classes)
            if cell.linear
            else cell.model,
            rounds=cell.rounds,
            seed=self.first_seed + seed,
            evaluate_every=every or cell.rounds,
            device=self.device,
        )
        if self._prepared is None or not cell.linear:  # a network's first weights differ from seed to seed
            self._prepared = prepare(experiment, method.build(experiment.setting))
        for done in Rehearsal(experiment, self._prepared).rounds():
            if done.simulated:
                yield done.simulated["test_accuracy"]


def choose_scratch(names: list[str], out: Path, place: Workspace, say: Say) -> None:
    """A rate for each cell, row and case, on public images; stored in scratch.json, which keeps what it has."""
    path = out / "scratch.json"
    chosen = _read(path, {})
    for cell in (CELLS[name] for name in names):
        if cell.name in chosen or cell.stand_in is None:
            continue
        chosen[cell.name] = _choose(cell, cell.stand_in, place)
        path.write_text(json.dumps(chosen, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        say(f"{cell.name}: {chosen[cell.name]['rows']}")


def _choose(cell: Cell, stand_in: str, place: Workspace) -> dict[str, Any]:
    task, kind = TASKS[cell.task], _kind(cell)
    public = dataset(stand_in, kind, place.folders)
    sizes = federate(dataset(cell.task, kind, place.folders), clients=task.clients, proxy=public, seed=0)
    seen: dict[tuple[str, Case], list[list[float]]] = {(row, case): [] for row in ROWS for case in CASES}
    for seed in TUNING_SEEDS:
        runs = Runs(cell, bootstrap(without_private(sizes), seed), place.device, first_seed=0)
        for (row, case), by_seed in seen.items():
            by_seed.append([list(runs.accuracies(row, case, lr, seed))[-1] for lr in RATES])
    rows: dict[str, Any] = {row: {} for row in ROWS}
    for (row, case), by_seed in seen.items():
        means = np.mean(by_seed, 0)
        best = int(means.argmax())
        rows[row][case] = {"lr": RATES[best], "public_accuracy": float(f"{means[best]:.4g}"), "trials": len(RATES)}
    return {"stand_in": stand_in, "rows": rows}


@dataclass(frozen=True)
class Trial:
    """One run of a cell."""

    cell: Cell
    row: str
    case: Case
    seed: int
    lr: float

    def result(self, accuracy: float) -> dict[str, Any]:
        about = {"cell": self.cell.name, "row": self.row, "case": self.case, "seed": self.seed}
        return {**about, "rounds": self.cell.rounds, "accuracy": accuracy}


def play_scratch(names: list[str], out: Path, run: Runner, say: Say) -> None:
    """Results are added to results-scratch.json; runs that are there already are kept."""
    path, chosen = out / "results-scratch.json", _read(out / "scratch.json", {})
    records: list[dict[str, Any]] = _read(path, [])
    known = {(r["cell"], r["row"], r["case"], r["seed"]) for r in records}
    for cell in (CELLS[name] for name in names):
        wanted = [
            Trial(cell, row, case, seed, rate(cell, chosen, row, case))
            for seed in range(cell.seeds)
            for case in CASES
            for row in ROWS
            if (cell.name, row, case, seed) not in known
        ]
        for trial, found in zip(wanted, run(tried, wanted), strict=True):
            records.append(trial.result(found["accuracy"]))
            path.write_text("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n", encoding="utf-8")
            say(f"{cell.name}, {trial.row}, {trial.case}, seed {trial.seed}: {100 * found['accuracy']:.1f}%")


def tried(place: Workspace, trial: Trial) -> Found:
    """The accuracy on test records after the last round."""
    runs = _runs(trial.cell, place)
    return {"accuracy": list(runs.accuracies(trial.row, trial.case, trial.lr, trial.seed))[-1]}


@lru_cache(maxsize=1)
def _runs(cell: Cell, place: Workspace) -> Runs:
    return Runs(cell, _private(cell, place), place.device)


def rate(cell: Cell, chosen: dict[str, Any], row: str, case: Case) -> float:
    if cell.lr is not None:
        return cell.lr
    if cell.name not in chosen:
        raise UserError(f"there is no learning rate for {cell.name} in scratch.json: run the stage choose first")
    return float(chosen[cell.name]["rows"][row][case]["lr"])


def _private(cell: Cell, place: Workspace) -> FederatedData:
    records = dataset(cell.task, _kind(cell), place.folders)
    return federate(records, clients=TASKS[cell.task].clients, seed=0)


def _kind(cell: Cell) -> tuple[str, ...]:
    return (SCATTERING,) if cell.model == SCATTERING else ()


def _read(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default
