"""Runs of cells: settings from public records first, then a network, then everything else with both.

Each of the three is a function of a `Workspace` and of what decides it, so that any process can do it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from modicum.data import load
from modicum.data.arrays import Dataset
from modicum.data.budgets import assign_budgets
from modicum.data.federate import federate
from modicum.data.partition import Dirichlet
from modicum.federation.experiment import Experiment, Federation, Prepared, prepare
from modicum.federation.rehearsal import Rehearsal, stand_in
from modicum.papers.fedmap.fit import Schedule, fit_metanet
from modicum.papers.pac_dp.grid import gradient_scale
from modicum_bench.fedmap.cells import ALPHA, LARGE, TASKS, TRAINED, Cell, Choice, method
from modicum_bench.fedmap.regimes import REGIMES, regime
from modicum_bench.fedmap.rivals import loader

Loader = Callable[[str], Dataset]
LINEAR = tuple(Choice(lr, 0.0) for lr in (0.3, 1.0, 3.0))
RIVAL = (
    *(Choice(lr, 0.0) for lr in (10.0, 30.0)),
    *(Choice(lr, 0.9, 1.0, 0.95) for lr in (1.0, 3.0, 10.0, 30.0)),
)
SCHEDULE = Schedule(runs=2, held_out=3, passes=2, epochs=20)
RATES = {  # by network and participation
    "lenet-contrast": {0.1: (0.04, 0.07, 0.12), 0.2: (0.08, 0.14, 0.24), 0.3: (0.12, 0.21, 0.36)},
    "cnn-contrast": {0.1: (0.08, 0.15, 0.3), 0.2: (0.12, 0.22, 0.45), 0.3: (0.15, 0.3, 0.6)},
}
SHARES = {"lenet-contrast": 0.3, "cnn-contrast": 0.1}  # of the median norm, for the first bound


def grid(task: str, participation: float) -> tuple[Choice, ...]:
    """What is tried: a network from nothing has momentum, an average over rounds and bounds under the median."""
    if TASKS[task].model == LARGE:
        return tuple(Choice(lr, 0.9) for lr in (0.03, 0.1, 0.3))
    model = TASKS[task].model
    if model not in RATES:
        return RIVAL if " " in task else LINEAR
    return tuple(Choice(lr, 0.9, SHARES[model], 0.95) for lr in RATES[model][participation])


@dataclass(frozen=True)
class Workspace:
    """Where a process finds records, computes, and leaves results."""

    out: Path
    data_dir: Path | None = None
    backbone: Path | None = None
    device: str = "cpu"

    def load(self, name: str) -> Dataset:
        """A regime that is drawn, or a dataset from its files."""
        folder = None if self.data_dir is None else str(self.data_dir)
        return regime(name) if name in REGIMES else load(name, folder)


@dataclass(frozen=True)
class Part:
    """A column of Table 4, and the variant or the body that is chosen or fitted for it."""

    task: str
    participation: float
    what: str
    choice: Choice | None = None  # what a body is fitted with


@dataclass(frozen=True)
class Run:
    """A cell with its settings."""

    cell: Cell
    choice: Choice
    network: str | None = None


def chosen(place: Workspace, part: Part) -> Choice:
    """A variant's settings."""
    return _bench(place).tuned(part.task, part.participation, part.what)


def fitted(place: Workspace, part: Part) -> str:
    """The file of a network."""
    assert part.choice is not None
    return str(_bench(place).fitted(part.task, part.participation, part.what, part.choice, SCHEDULE))


def played(place: Workspace, run: Run) -> dict[str, Any]:
    """A cell's result."""
    return _bench(place).played(run.cell, run.choice, run.network)


@lru_cache(maxsize=1)
def _bench(place: Workspace) -> Bench:
    return Bench(loader(place.load, place.backbone, place.out / "features"), place.out, place.device)


class Bench:
    """Keeps data that several cells share, and writes each result as it comes."""

    def __init__(self, load: Loader, out: Path, device: str = "cpu") -> None:
        self.load, self.out, self.device = load, out, device
        self._sets: dict[str, Dataset] = {}
        self._federations: dict[tuple[str, float, int], Federation] = {}
        self._prepared: tuple[tuple[str, int], Prepared] | None = None
        self._scale: dict[str, float] = {}
        out.mkdir(parents=True, exist_ok=True)

    def federation(self, task: str, budget: float, seed: int) -> Federation:
        if task not in self._sets:
            self._sets[task] = self.load(task)
        key = (task, budget, seed)
        if key not in self._federations:
            clients, proxy = TASKS[task].clients, TASKS[task].proxy
            data = federate(self._sets[task], clients=clients, partition=Dirichlet(ALPHA), seed=seed, proxy=proxy)
            self._federations = {key: Federation(data, assign_budgets(budget, clients, seed))}
        return self._federations[key]

    def experiment(self, cell: Cell, choice: Choice, network: str | None = None) -> Experiment:
        task = TASKS[cell.task]
        federation = self.federation(cell.task, cell.budget, cell.seed)
        return Experiment(
            federation=federation,
            method=method(cell.variant, choice, network),
            model=task.model,
            rounds=task.rounds,
            per_round=round(cell.participation * task.clients),
            seed=cell.seed,
            average=choice.average,
            evaluate_every=task.rounds,
            device=self.device,
        )

    def scaled(self, cell: Cell, choice: Choice) -> Choice:
        """C₀ is the choice's share of the median norm of a public gradient at the first model."""
        if cell.task not in self._scale:
            made = stand_in(self.experiment(replace(cell, seed=0), choice), 0)
            self._scale[cell.task] = gradient_scale(prepare(made, made.method.build(made.setting)))
        return replace(choice, clip=choice.share * self._scale[cell.task])

    def tuned(self, task: str, participation: float, variant: str = "fixed") -> Choice:
        """The choice with which a variant is best on stand-ins of public records; kept in a file."""
        name = f"choice {task} {participation:g} {variant}"
        if not self._path(name).exists():
            found = [self.tried(task, participation, choice, variant) for choice in grid(task, participation)]
            self._write(name, {"tried": [(a, asdict(c)) for a, c in found]})
        tried = json.loads(self._path(name).read_text())["tried"]
        return Choice(**max(tried, key=lambda t: t[0])[1])

    def tried(self, task: str, participation: float, choice: Choice, variant: str) -> tuple[float, Choice]:
        """Accuracy of one choice there, and the choice with its bound."""
        cell = Cell(task, participation, variant, 0)
        choice = self.scaled(cell, choice)
        run = Rehearsal(stand_in(self.experiment(cell, choice), 0))
        return float(list(run.rounds())[-1].simulated["test_accuracy"]), choice

    def fitted(self, task: str, participation: float, body: str, choice: Choice, schedule: Schedule) -> Path:
        """A network trained on public records of this task, from its file where there is one."""
        variant, name = "mlp" if body == "mlp" else "metanet", f"network {task} {participation:g} {body}"
        path = self._path(name).with_suffix(".npz")
        if self._path(name).exists():
            return path
        made = self.experiment(Cell(task, participation, variant, 0), choice)
        fit = fit_metanet(made, replace(schedule, body="mlp" if body == "mlp" else "bert"), path)
        figures = {"gains": fit.gains, "losses": fit.losses, "decisions": fit.decisions}
        self._write(name, figures)
        return path

    def played(self, cell: Cell, choice: Choice, network: str | None = None) -> dict[str, Any]:
        """One cell, from its file where it was played before."""
        path = self._path(cell.name)
        if path.exists():
            known: dict[str, Any] = json.loads(path.read_text())
            return known
        begun = time.monotonic()
        made = self.experiment(cell, choice, network if cell.variant in TRAINED else None)
        key = (cell.task, cell.seed)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = (key, prepare(made, made.method.build(made.setting)))
        run = Rehearsal(made, self._prepared[1])
        bounds, kinds = [], []
        while not run.server.finished:
            decisions = run.server.propose().decisions.values()
            bounds.append(next(iter(decisions)).bound)
            kinds.append(sorted(str(d.kind) for d in decisions)[len(decisions) // 2])
            last = run.step()
        found = {
            **cell.to_dict(),
            "accuracy": last.simulated["test_accuracy"],
            "loss": last.simulated["test_loss"],
            "refused": len(run.server.state.retired),
            "bounds": bounds,
            "kinds": kinds,
            "seconds": time.monotonic() - begun,
        }
        self._write(cell.name, found)
        return found

    def _path(self, name: str) -> Path:
        return self.out / f"{name.replace(' ', '_').replace(',', '')}.json"

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self._path(name).write_text(json.dumps(value) + "\n")
