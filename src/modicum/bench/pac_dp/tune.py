"""Settings chosen on public records alone, and written down before any test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from modicum.bench.pac_dp import methods
from modicum.bench.pac_dp.data import Folders, budgets, divided, head, without_private
from modicum.bench.pac_dp.settings import CASES, HOT_EPOCHS, Case, Preset, Task
from modicum.data.arrays import FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation, MethodSpec, Prepared, prepare
from modicum.fitting.curves import fit_curve
from modicum.fitting.grid import Grid, run_cell, simulate
from modicum.fitting.proxy import bootstrap
from modicum.methods import PacDp
from modicum.policies.curve import Curve

Say = Callable[[str], None]


class Judge:
    """Accuracy of a method on stand-in federations of public records, averaged over seeds."""

    def __init__(self, task: Task, folders: Folders, seeds: tuple[int, ...], device: str) -> None:
        self.task, self.folders, self.seeds, self.device = task, folders, seeds, device
        self.data: FederatedData = without_private(divided(task, folders))
        self._stand_ins = {seed: bootstrap(self.data, seed) for seed in seeds}
        self._prepared: dict[tuple[int, int, int], Prepared] = {}

    def experiment(
        self, method: MethodSpec, size: int, rounds: int, hot: int, case: Case, seed: int
    ) -> Experiment:
        stand_in = self._stand_ins[seed]
        granted = budgets(self.task, case, len(stand_in.clients), seed)
        return Experiment(
            federation=Federation(stand_in, granted),
            method=method,
            model=head(stand_in, size),
            rounds=rounds,
            hot_start=hot,
            seed=seed,
            evaluate_every=rounds,
            device=self.device,
        )

    def accuracy(self, method: MethodSpec, size: int, rounds: int, hot: int, case: Case) -> float:
        found = []
        for seed in self.seeds:
            cell = self.experiment(method, size, rounds, hot, case, seed)
            key = (size, hot, seed)
            if key not in self._prepared:
                self._prepared[key] = prepare(cell, method.build(cell.setting))
            found.append(run_cell(cell, self._prepared[key], self.folders.cache / "cells")["accuracy"])
        return float(np.mean(found))

    def curve(self, lr: float, size: int, rounds: int, hot: int, grid: Grid, scale_free: bool = False) -> Curve:
        """F for this learning rate."""
        public = Experiment(
            federation=Federation(self.data, (1.0,) * len(self.data.clients)),
            method=PacDp(lr=lr),
            model=head(self.data, size),
            rounds=rounds,
            hot_start=hot,
            device=self.device,
        )
        return fit_curve(simulate(public, grid, self.folders.cache / "cells"), scale_free).curve


def tune(task: Task, preset: Preset, folders: Folders, out: Path, device: str, say: Say) -> dict[str, Any]:
    """Size, rounds, learning rates, curves and every method's own setting; stored as <task>.json in `out`."""
    judge = Judge(task, folders, preset.tuning(task), device)
    chosen: dict[str, Any] = {"task": task.name, "preset": preset.name, "starts": {}}
    for start, hot in (("hot", HOT_EPOCHS), ("cold", 0)):
        chosen["starts"][start] = _tune_start(judge, preset, hot, out, say, full=start == "hot")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{task.name}.json"
    path.write_text(json.dumps(chosen, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return chosen


def _tune_start(judge: Judge, preset: Preset, hot: int, out: Path, say: Say, *, full: bool) -> dict[str, Any]:
    task = judge.task
    shapes = [
        (judge.accuracy(PacDp(lr=lr, clip=0.5), size, rounds, hot, "same"), size, rounds, lr)
        for size in task.sizes
        for rounds in task.rounds
        for lr in preset.lrs(task)
    ]
    best, size, rounds, _ = max(shapes, key=lambda s: s[0])
    say(f"{task.name} hot={hot}: size {size}, {rounds} rounds, public accuracy {best:.4f}")
    found: dict[str, Any] = {"hot": hot, "size": size, "rounds": rounds, "methods": {}}
    found["methods"]["PAC-DP"] = _tune_pac_dp(judge, preset, size, rounds, hot, out, say)
    for row in methods.rows(task, preset.bounds) if full else ():
        picked = {}
        for case in CASES:
            trials = []
            for lr in preset.lrs(task):
                for option in row.options:
                    try:
                        trials.append((judge.accuracy(row.make(lr, option), size, rounds, hot, case), lr, option))
                    except UserError as error:
                        say(f"{task.name} {row.name} {case}: {error}")
            if trials:
                accuracy, lr, option = max(trials, key=lambda t: t[0])
                picked[case] = {"lr": lr, "option": option, "public_accuracy": accuracy, "trials": len(trials)}
        found["methods"][row.name] = picked
        say(f"{task.name} {row.name}: {picked}")
    return found


def _tune_pac_dp(
    judge: Judge, preset: Preset, size: int, rounds: int, hot: int, out: Path, say: Say
) -> dict[str, Any]:
    """One curve for each learning rate; the rate is then chosen for each case like any other method's."""
    grid = Grid(judge.task.fit_budgets, preset.bounds, judge.seeds)
    kind = "hot" if hot else "cold"
    (out / "curves").mkdir(parents=True, exist_ok=True)
    trials: dict[Case, list[tuple[float, float, str]]] = {case: [] for case in CASES}
    for lr in preset.lrs(judge.task):
        curve = judge.curve(lr, size, rounds, hot, grid)
        path = out / "curves" / f"{judge.task.name}-{kind}-lr{lr:g}.json"
        curve.write(path)
        for case in CASES:
            accuracy = judge.accuracy(methods.pac_dp(lr, str(path)), size, rounds, hot, case)
            trials[case].append((accuracy, lr, path.name))
        say(f"{judge.task.name} {kind} PAC-DP lr {lr:g}: {[t[-1][0] for t in trials.values()]}")
    picked = {case: max(tried, key=lambda t: t[0]) for case, tried in trials.items()}
    kept = {name for _, _, name in picked.values()}
    for _, _, name in (t for tried in trials.values() for t in tried):
        if name not in kept:
            (out / "curves" / name).unlink(missing_ok=True)
    return {
        case: {"lr": lr, "curve": name, "public_accuracy": accuracy, "trials": len(trials[case])}
        for case, (accuracy, lr, name) in picked.items()
    }
