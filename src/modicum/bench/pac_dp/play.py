"""Test runs with the settings that were written down: every method, case and seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modicum.bench.pac_dp import methods
from modicum.bench.pac_dp.data import Folders, divided, federation, head
from modicum.bench.pac_dp.settings import CASES, Case, Preset, Task
from modicum.errors import UserError
from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, MethodSpec, Prepared, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import PacDp
from modicum.privacy.accounting import epsilon

Say = Callable[[str], None]
SEARCH_SEEDS = 3


class Bench:
    """One task. Data, features and hot start of a draw are shared by all methods."""

    def __init__(self, task: Task, folders: Folders, device: str) -> None:
        self.task, self.folders, self.device = task, folders, device
        self._key: tuple[int, int, int] | None = None
        self._prepared: Prepared | None = None

    def run(
        self, method: MethodSpec, start: dict[str, Any], case: Case, seed: int, budget: float | None = None
    ) -> dict[str, Any]:
        """Accuracy by rounds, and the true ε of the clients; `budget` instead of the task's own."""
        data = divided(self.task, self.folders, seed)
        experiment = Experiment(
            federation=federation(
                self.task if budget is None else replace(self.task, same=budget), case, data, seed
            ),
            method=method,
            model=head(data, start["size"]),
            rounds=start["rounds"],
            hot_start=start["hot"],
            seed=1000 + seed,  # none of the seeds that settings were chosen with
            device=self.device,
        )
        key = (start["size"], start["hot"], seed)
        if key != self._key:
            self._key, self._prepared = key, prepare(experiment, method.build(experiment.setting))
        run = Rehearsal(experiment, self._prepared)
        first = evaluate(run.backend, run.data.first, run.data.test)["accuracy"]
        rounds = list(run.rounds())
        true = sorted(epsilon(list(p.releases), p.spec).epsilon for p in _different(run).values() if p.releases)
        groups = sorted({f.budget for f in run.facts.values()})
        return {
            "accuracy": rounds[-1].simulated["test_accuracy"],
            "first": first,
            "by_round": [r.simulated["test_accuracy"] for r in rounds],
            "bound": rounds[0].bound,
            "granted": groups,
            "epsilon": [true[0], statistics.median(true), true[-1]] if true else None,
        }


def _different(run: Rehearsal) -> dict[Any, Any]:
    """One plan for each kind of client: those with equal budgets and sizes cost the same."""
    return {(p.budget, tuple(p.releases)): p for p in run.plans.values()}


def specs(
    task: Task, preset: Preset, chosen: dict[str, Any], out: Path
) -> Iterator[tuple[str, str, Case, MethodSpec]]:
    """(start, row, case, method) of every cell that settings were chosen for."""
    table = {row.name: row for row in methods.rows(task, preset.bounds)}
    for start, found in chosen["starts"].items():
        for name, cases in found["methods"].items():
            for case in CASES:
                if case not in cases:
                    continue
                picked = cases[case]
                if name == "PAC-DP":
                    curve = str(out / "curves" / picked["curve"])
                    yield start, name, case, methods.pac_dp(picked["lr"], curve)
                    if start == "hot":
                        yield (
                            start,
                            "PAC-DP, weights by records",
                            case,
                            methods.pac_dp(picked["lr"], curve, weights="weighted"),
                        )
                else:
                    yield start, name, case, table[name].make(picked["lr"], picked["option"])


def play(
    task: Task, preset: Preset, chosen: dict[str, Any], folders: Folders, out: Path, device: str, say: Say
) -> list[dict[str, Any]]:
    """All cells of a task, one record each."""
    bench, records = Bench(task, folders, device), []
    cells = list(specs(task, preset, chosen, out))
    for seed in range(preset.seeds or task.seeds):
        for start in chosen["starts"]:
            for s, name, case, method in cells:
                if s != start:
                    continue
                about = {"task": task.name, "start": start, "row": name, "case": case, "seed": seed}
                try:
                    records.append({**about, **bench.run(method, chosen["starts"][start], case, seed)})
                except UserError as error:
                    records.append({**about, "accuracy": None, "reason": str(error)})
            if start == "hot" and seed < SEARCH_SEEDS:
                records += _search(bench, chosen["starts"][start], preset, out, seed)
        say(f"{task.name} seed {seed}: {len(records)} cells")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return records


def _search(bench: Bench, start: dict[str, Any], preset: Preset, out: Path, seed: int) -> list[dict[str, Any]]:
    """What the best fixed bound would have given, on records that no curve was fitted to."""
    records = []
    for budget, bound, method in _exhaustive(bench.task, start, preset, out):
        found = bench.run(method, start, "same", seed, budget=budget)
        about = {"task": bench.task.name, "start": "hot", "row": f"search C={bound:g}", "case": f"{budget:g}"}
        records.append({**about, "seed": seed, **found})
    return records


def _exhaustive(
    task: Task, start: dict[str, Any], preset: Preset, out: Path
) -> list[tuple[float, float, MethodSpec]]:
    """Every fixed bound at every fitted budget, beside PAC-DP with its curve (bound 0), same rate and schedule."""
    picked = start["methods"]["PAC-DP"]["same"]
    lr, curve = picked["lr"], str(out / "curves" / picked["curve"])
    fixed = [(bound, PacDp(lr=lr, clip=bound)) for bound in preset.bounds]
    tried = [(0.0, methods.pac_dp(lr, curve)), *fixed]
    return [(budget, bound, method) for budget in task.fit_budgets for bound, method in tried]
