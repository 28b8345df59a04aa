"""Settings chosen on public records alone, and written down before any test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modicum.core.setting import MethodSpec
from modicum.methods import PacDp
from modicum.papers.pac_dp.curve import Curve
from modicum.papers.pac_dp.fit import fit_curve
from modicum.papers.pac_dp.grid import Grid, Matrix
from modicum_bench.pac_dp import methods
from modicum_bench.pac_dp.cells import Cell, Runner, Workspace, judged, scale
from modicum_bench.pac_dp.data import cross_validated, divided, uses_labels, without_private
from modicum_bench.pac_dp.settings import CASES, PRESETS, STARTS, Case, Preset, Task

Say = Callable[[str], None]
FIRST_BOUND = 0.5  # while features, rounds and the neighbourhood of the learning rate are sought


class Judge:
    """Accuracy of methods on stand-in federations of public records, averaged over seeds."""

    def __init__(self, task: Task, seeds: tuple[int, ...], place: Workspace, run: Runner, *, hot: bool) -> None:
        self.task, self.seeds, self.place, self.run, self.hot = task, seeds, place, run, hot

    def cells(self, method: MethodSpec, features: str, rounds: int, case: Case | float) -> list[Cell]:
        return [Cell(self.task.name, method, features, self.hot, rounds, case, seed) for seed in self.seeds]

    def accuracies(self, trials: Sequence[tuple[MethodSpec, str, int, Case]]) -> list[float]:
        """One mean for each trial; -1 where a budget cannot be met."""
        found = self._found([self.cells(*trial) for trial in trials])
        return [float(np.mean([f.get("accuracy", -1.0) for f in seeds])) for seeds in found]

    def _found(self, groups: Sequence[list[Cell]]) -> list[list[dict[str, Any]]]:
        """Cells of one seed follow each other, so that a process prepares few federations."""
        order = sorted((s, g) for g, cells in enumerate(groups) for s in range(len(cells)))
        results = dict(zip(order, self.run(judged, [groups[g][s] for s, g in order]), strict=True))
        return [[results[s, g] for s in range(len(cells))] for g, cells in enumerate(groups)]

    def curves(self, rates: Sequence[float], features: str, rounds: int, grid: Grid) -> list[Curve]:
        """F for each learning rate, from budgets × bounds × seeds."""
        wanted = [(lr, budget, bound) for lr in rates for budget in grid.budgets for bound in grid.bounds]
        groups = [self.cells(PacDp(lr=lr, clip=c), features, rounds, budget) for lr, budget, c in wanted]
        found = dict(zip(wanted, self._found(groups), strict=True))
        unit = scale(self.place, groups[0][0])
        return [self._curve(lr, grid, found, unit) for lr in rates]

    def _curve(
        self, lr: float, grid: Grid, found: dict[tuple[float, float, float], list[dict[str, Any]]], unit: float
    ) -> Curve:
        def values(key: str) -> np.ndarray:
            return np.array([[[f[key] for f in found[lr, e, c]] for c in grid.bounds] for e in grid.budgets])

        first = [found[lr, budget, grid.bounds[0]][0] for budget in grid.budgets]
        matrix = Matrix(
            grid,
            values("accuracy"),
            values("loss"),
            tuple(f["quietness"] for f in first),
            unit,
            float(np.median(divided(self.task, self.place.folders).sizes)),
            int(first[0]["dimension"]),
            tuple(f["multiplier"] for f in first),
        )
        return fit_curve(matrix).curve


def tune(task: Task, preset: Preset, place: Workspace, out: Path, run: Runner, say: Say) -> dict[str, Any]:
    """Features, rounds, learning rates, curves and every method's own setting; stored as <task>.json in `out`.

    What is stored there already is kept: a stopped choice goes on, and a new row joins the others.
    """
    path = out / f"{task.name}.json"
    chosen: dict[str, Any] = {"task": task.name, "preset": preset.name, "starts": {}}
    if path.is_file():
        chosen = json.loads(path.read_text(encoding="utf-8"))
        preset = PRESETS.get(chosen["preset"], preset)  # as many trials for a new row as the others had
    (out / "curves").mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        text = json.dumps(chosen, ensure_ascii=False, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")

    for start in STARTS:
        judge = Judge(task, task.tuning_seeds, place, run, hot=start == "hot")
        if start not in chosen["starts"]:
            chosen["starts"][start] = _tune_start(judge, preset, out, say)
            keep()
        found = chosen["starts"][start]
        for row in _rows(judge, preset, found, out):
            known = found["methods"].setdefault(row.name, {})
            missing = tuple(case for case in CASES if case not in known)
            if missing:
                known |= _tune_row(judge, preset, row, found["features"], found["rounds"], missing)
                keep()
                say(f"{task.name} {start} {row.name}: {known}")
    return chosen


def _tune_start(judge: Judge, preset: Preset, out: Path, say: Say) -> dict[str, Any]:
    """Features and rounds for all methods, and PAC-DP's rates and curves."""
    task = judge.task
    rates = preset.rates(task)
    names, valued = _features(judge)
    shapes = [(name, rounds, lr) for name in names for rounds in task.rounds for lr in rates]
    seen = judge.accuracies(
        [(PacDp(lr=lr, clip=FIRST_BOUND), name, rounds, "same") for name, rounds, lr in shapes]
    )
    features, rounds, lr = shapes[int(np.argmax(seen))]
    say(f"{task.name} hot={judge.hot}: {features}, {rounds} rounds, rate {lr:g}: {max(seen):.4f}")
    for name in names:
        valued.setdefault(name, max(a for a, s in zip(seen, shapes, strict=True) if s[0] == name))
    near = rates.index(lr)
    picked = _tune_pac_dp(judge, preset, features, rounds, rates[max(0, near - 1) : near + 2], out, say)
    about = {"hot": judge.hot, "features": features, "rounds": rounds, "by_features": valued}
    return {**about, "methods": {"PAC-DP": picked}}


def _rows(judge: Judge, preset: Preset, found: dict[str, Any], out: Path) -> list[methods.Row]:
    """The other methods: all from a hot start, those of the paper's Figs. 12 and 13 from a cold one."""
    rows = [r for r in methods.rows(judge.task, preset.bounds) if judge.hot or r.name in methods.COLD]
    if judge.task.adam and not judge.hot:
        curve = found["methods"]["PAC-DP"]["same"]["curve"]
        rows += methods.adam_rows(preset.bounds, str(out / "curves" / curve))
    return rows


def _features(judge: Judge) -> tuple[list[str], dict[str, float]]:
    """The candidates, and what the hot start's cross-validation says of them.

    A hot start takes the best of them: the whole proxy speaks, while a stand-in's start has a third of it. A cold
    start has seen no public label, so its features have not either; simulation chooses among them.
    """
    task = judge.task
    if not judge.hot:
        return [name for name in task.features if not uses_labels(name)], {}
    data = without_private(divided(task, judge.place.folders))
    valued = {name: cross_validated(data, name) for name in task.features}
    return [max(valued, key=lambda name: valued[name])], valued


def _tune_row(
    judge: Judge, preset: Preset, row: methods.Row, features: str, rounds: int, cases: tuple[Case, ...]
) -> dict[str, Any]:
    rates = preset.rates(judge.task, len(row.options))
    tried = [(lr, option) for lr in rates for option in row.options]
    trials = [(row.make(lr, option), features, rounds, case) for case in cases for lr, option in tried]
    seen = np.reshape(judge.accuracies(trials), (len(cases), len(tried)))
    picked: dict[str, Any] = {}
    for case, accuracies in zip(cases, seen, strict=True):
        best = int(np.argmax(accuracies))
        if accuracies[best] >= 0:  # else no trial met the budgets
            lr, option = tried[best]
            found = {"public_accuracy": float(accuracies[best]), "trials": len(tried)}
            picked[case] = {"lr": lr, "option": option, **found}
    return picked


def _tune_pac_dp(
    judge: Judge, preset: Preset, features: str, rounds: int, rates: Sequence[float], out: Path, say: Say
) -> dict[str, Any]:
    """One curve for each learning rate; the rate is then chosen for each case like any other method's."""
    grid = Grid(judge.task.fit_budgets, preset.bounds, judge.seeds)
    kind = "hot" if judge.hot else "cold"
    names = {lr: f"{judge.task.name}-{kind}-lr{lr:g}.json" for lr in rates}
    for lr, curve in zip(rates, judge.curves(rates, features, rounds, grid), strict=True):
        curve.write(out / "curves" / names[lr])
    specs = [methods.pac_dp(lr, str(out / "curves" / names[lr])) for lr in rates]
    picked: dict[str, Any] = {}
    for case in CASES:
        seen = judge.accuracies([(spec, features, rounds, case) for spec in specs])
        lr = rates[int(np.argmax(seen))]
        picked[case] = {"lr": lr, "curve": names[lr], "public_accuracy": max(seen), "trials": len(rates)}
    kept = {p["curve"] for p in picked.values()}
    for name in set(names.values()) - kept:
        (out / "curves" / name).unlink()
    say(f"{judge.task.name} {kind} PAC-DP: {picked}")
    return picked
