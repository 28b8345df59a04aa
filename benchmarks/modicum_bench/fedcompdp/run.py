"""Stages of `modicum bench fedcompdp`: choose settings on public stand-ins, play the task, write tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modicum.comparing.workers import Progress, work
from modicum.errors import UserError
from modicum_bench.fedcompdp.backbones import ensure
from modicum_bench.fedcompdp.cells import Cell, Found, Try, head_file, played, tried
from modicum_bench.fedcompdp.play import stage
from modicum_bench.fedcompdp.report import picture, tables
from modicum_bench.fedcompdp.rows import AS_PRINTED, GRID, OURS, TABLE_II, VIEWS, Settings, names, tuned
from modicum_bench.fedcompdp.tasks import JOINED, PAPER, QUICK, SCRATCH, Task, private

STAGES = ("choose", "test", "scratch", "report")
SEEDS, STEPS = {"quick": 1, "paper": 3}, {"quick": 10, "paper": 100}
PARTS = (*TABLE_II, AS_PRINTED)  # rows that other features have nothing new to say of
FROM_SCRATCH = 30  # steps of `auto`, which has enough with them
Say = Callable[[str], None]


def bench(
    preset: str,
    stages: Sequence[str],
    out: Path,
    backbones: Path,
    device: str = "cpu",
    workers: int = 1,
    say: Say = print,
    progress: Progress | None = None,
) -> str:
    """The stages in turn; what is stored is not done again. Gives the tables as text."""
    tasks = PAPER if preset == "paper" else QUICK
    out.mkdir(parents=True, exist_ok=True)
    if workers < 1:
        raise UserError(f"give at least one worker, got {workers}")
    if {"choose", "test"} & set(stages):
        ensure(tasks, backbones, device, say)
    if "choose" in stages:
        _choose(tasks, STEPS[preset], out, backbones, workers, progress)
        say(f"settings: {out / 'settings.json'}")
    if "test" in stages:
        if not (out / "settings.json").is_file():
            raise UserError("settings are chosen before the test is opened: run the stage choose first")
        tasks = (*tasks, *JOINED) if preset == "paper" else tasks
        _test(left(tasks, SEEDS[preset], STEPS[preset], out, backbones, device), out, workers, progress)
    if "scratch" in stages and preset == "paper":
        _test(left(SCRATCH, SEEDS[preset], FROM_SCRATCH, out, backbones, device), out, workers, progress)
    text = tables(out)
    (out / "results.md").write_text(text, encoding="utf-8")
    if "report" in stages:
        picture(out)
    return text


def _choose(
    tasks: Sequence[Task], steps: int, out: Path, backbones: Path, workers: int, progress: Progress | None
) -> None:
    """For each dataset, by its first partition, each view and row: the settings that do best on stand-ins."""
    path, tries = out / "settings.json", out / "tries.jsonl"
    if path.is_file():
        return
    first = {task.name: task for task in reversed(tasks)}
    known = {(t["task"], t["view"], t["row"], t["way"], t["clip"]): t for t in _lines(tries)}
    wanted = [
        Try(task, backbones, view, row, settings, steps)
        for settings in GRID
        for task in first.values()
        for view in VIEWS
        for row in tuned(view)
        if (task.name, view, row, settings["way"], settings["clip"]) not in known
    ]
    for found in work(tried, wanted, workers=workers, progress=progress, again=True):
        _append(tries, found)
    chosen: dict[str, Any] = {}
    for found in sorted(_lines(tries), key=lambda t: (t["public"], -t["way"])):  # the best is written last
        own = chosen.setdefault(found["task"], {}).setdefault(found["view"], {})
        own[found["row"]] = {"way": found["way"], "clip": found["clip"]}
    path.write_text(json.dumps(chosen, indent=1, sort_keys=True) + "\n")


def left(
    tasks: Sequence[Task], seeds: int, steps: int, out: Path, backbones: Path, device: str = "cpu"
) -> list[Cell]:
    """Cells that are not in results.jsonl: Table I of every task first, then what FedCompDP's parts are worth."""
    stored = out / "settings.json"
    chosen = json.loads(stored.read_text()) if stored.is_file() else {}
    done = {(r["task"], r["seed"], r["view"], r["row"]) for r in _lines(out / "results.jsonl")}

    def settings(task: Task, view: str, row: str) -> Settings:
        own: dict[str, Settings] = chosen.get(task.name, {}).get(view, {})
        return own.get(OURS if row in TABLE_II else row, {})

    cells = [
        Cell(task, backbones, seed, view, row, settings(task, view, row), steps, device, out)
        for parts in (False, True)
        for task in tasks
        for seed in range(seeds)
        for view in VIEWS
        for row in names(view, seed, task.scratch)
        if (row in TABLE_II) == parts and not (task.histograms and row in PARTS)
    ]
    return [cell for cell in cells if cell.key not in done]


def _test(cells: Sequence[Cell], out: Path, workers: int, progress: Progress | None) -> None:
    """Each result is written when it is there: whoever begins again goes on from it."""
    for cell in {c.task.features: c for c in cells if not c.task.scratch}.values():  # one head for all processes
        stage(private(cell.task, cell.backbones, 0), cell.steps, 0, "cpu", head_file(out, cell.task))
    for found in work(played, cells, workers=workers, progress=progress, again=True):
        _append(out / "results.jsonl", found)


def _append(path: Path, found: Found) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


def _lines(path: Path) -> list[Found]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
