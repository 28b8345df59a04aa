"""Test runs with the settings that were written down: every method, case and seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from modicum.core.setting import MethodSpec
from modicum.methods import PacDp
from modicum_bench.pac_dp import methods
from modicum_bench.pac_dp.cells import Cell, Runner, tested
from modicum_bench.pac_dp.settings import CASES, Preset, Task

Say = Callable[[str], None]
Key = tuple[str, str, str, int]
SEARCH_SEEDS = 2  # at least; half of those of a task with many
SWEPT = ("AUTO-S", "AQC", "CGM_Median", "rPDP-FL", "NbAFL")  # beside PAC-DP, at every budget that F was fitted at
SAMPLED = ("PAC-DP", "fixed C=1", "AUTO-S", "AQC")


def play(
    task: Task, preset: Preset, chosen: dict[str, Any], out: Path, run: Runner, say: Say
) -> list[dict[str, Any]]:
    """All cells of a task, one record each; those in the results' file are kept: a stopped test goes on."""
    path = out / f"results-{task.name}.json"
    records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    known = {_key(r) for r in records}
    seeds = range(task.seeds)
    batches = [_rows(task, preset, chosen, out, seed) for seed in seeds]
    batches += [_sweeps(task, preset, chosen, out, seed) for seed in seeds[: max(SEARCH_SEEDS, len(seeds) // 2)]]
    for batch in batches:
        cells = [(key, cell) for key, cell in batch if key not in known]
        if not cells:
            continue
        for (start, row, case, seed), found in zip(
            [key for key, _ in cells], run(tested, [cell for _, cell in cells]), strict=True
        ):
            records.append({"task": task.name, "start": start, "row": row, "case": case, "seed": seed, **found})
        path.write_text(as_lines(records), encoding="utf-8")
        say(f"{task.name}: {len(records)} cells")
    return records


def _key(record: dict[str, Any]) -> Key:
    return record["start"], record["row"], record["case"], record["seed"]


def _rows(task: Task, preset: Preset, chosen: dict[str, Any], out: Path, seed: int) -> Iterator[tuple[Key, Cell]]:
    """The methods of the main table, from both starts."""
    for start, found in chosen["starts"].items():
        about = found["features"], found["hot"], found["rounds"]
        for row, by_case in _specs(task, preset, found, out).items():
            for case in CASES:
                if case in by_case:
                    yield (start, row, case, seed), Cell(task.name, by_case[case], *about, case, seed)


def _sweeps(
    task: Task, preset: Preset, chosen: dict[str, Any], out: Path, seed: int
) -> Iterator[tuple[Key, Cell]]:
    """Other budgets, from both starts, and half of the clients from the hot one."""
    for start, found in chosen["starts"].items():
        about = found["features"], found["hot"], found["rounds"]
        specs = _specs(task, preset, found, out)
        for row, budget, method in _budgets(task, preset, found, specs, out):
            yield (start, row, f"{budget:g}", seed), Cell(task.name, method, *about, budget, seed)
        if found["hot"] and task.clients is not None:
            for row, case, cell in _sampled(task, found, specs, seed):
                yield (start, row, case, seed), cell


def _specs(task: Task, preset: Preset, found: dict[str, Any], out: Path) -> dict[str, dict[str, MethodSpec]]:
    """The methods by row and case, as they were chosen."""
    curve = found["methods"]["PAC-DP"]["same"]["curve"]
    rows = methods.rows(task, preset.bounds) + methods.adam_rows(preset.bounds, str(out / "curves" / curve))
    table = {row.name: row for row in rows}
    made: dict[str, dict[str, MethodSpec]] = {}
    for name, cases in found["methods"].items():
        made[name] = {
            case: _pac_dp(found, out, case) if name == "PAC-DP" else table[name].make(p["lr"], p["option"])
            for case, p in cases.items()
        }
    if found["hot"]:
        made["PAC-DP, weights by records"] = {
            case: _pac_dp(found, out, case, weights="weighted") for case in found["methods"]["PAC-DP"]
        }
    return made


def _pac_dp(found: dict[str, Any], out: Path, case: str, weights: str | None = None) -> PacDp:
    picked = found["methods"]["PAC-DP"][case]
    return methods.pac_dp(picked["lr"], str(out / "curves" / picked["curve"]), weights=weights)


def _budgets(
    task: Task, preset: Preset, found: dict[str, Any], specs: dict[str, dict[str, MethodSpec]], out: Path
) -> Iterator[tuple[str, float, MethodSpec]]:
    """Everyone with each fitted budget: PAC-DP, every fixed bound at its rate and schedule, and other methods."""
    lr = found["methods"]["PAC-DP"]["same"]["lr"]
    for budget in task.fit_budgets:
        yield "sweep PAC-DP", budget, _pac_dp(found, out, "same")
        for bound in preset.bounds:
            yield f"search C={bound:g}", budget, PacDp(lr=lr, clip=bound)
        for name in SWEPT:
            if "same" in specs.get(name, {}):
                yield f"sweep {name}", budget, specs[name]["same"]


def _sampled(
    task: Task, found: dict[str, Any], specs: dict[str, dict[str, MethodSpec]], seed: int
) -> Iterator[tuple[str, str, Cell]]:
    """Half of the clients in each round, by a public balanced schedule: as many rounds, and twice as many."""
    assert task.clients is not None
    for name in SAMPLED:
        for case in CASES:
            if case in specs.get(name, {}):
                for times in (1, 2):
                    shape = found["features"], found["hot"], times * found["rounds"]
                    cell = Cell(task.name, specs[name][case], *shape, case, seed, task.clients // 2)
                    yield f"half ×{times} {name}", case, cell


def as_lines(records: Sequence[dict[str, Any]]) -> str:
    """One cell a line, so that results can be compared as text."""
    rows = [json.dumps(_rounded(r), ensure_ascii=False, allow_nan=False) for r in records]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value
