"""Stages of `modicum bench fedcompdp`: choose settings on public stand-ins, play the task, write tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from modicum.errors import UserError
from modicum_bench.fedcompdp.play import PRINTED, Stage, play, probe, public_alone, stage
from modicum_bench.fedcompdp.report import picture, tables
from modicum_bench.fedcompdp.rows import (
    AS_PRINTED,
    AUTO,
    GATE,
    GRID,
    OURS,
    PUBLIC,
    SUM,
    TABLE_II,
    VIEWS,
    names,
    tuned,
)
from modicum_bench.fedcompdp.tasks import PAPER, QUICK, SCRATCH, Task, private, stand_in

STAGES = ("choose", "test", "scratch", "report")
SEEDS, STEPS = {"quick": 1, "paper": 3}, {"quick": 10, "paper": 100}
FROM_SCRATCH = 30  # steps of `auto`, which has enough with them
STAND_INS = 3
CERTIFIED = 40.0  # the largest ε, about, that is certified of integer noise, as sums have it
AT_ONCE = 5  # rows of a division that one process plays
Job = tuple[Any, ...]
Say = Callable[[str], None]


def bench(
    preset: str,
    stages: list[str],
    out: Path,
    backbones: Path,
    device: str = "cpu",
    workers: int = 1,
    say: Say = print,
) -> str:
    """The stages in turn; what is stored is not done again. Gives the tables as text."""
    tasks = PAPER if preset == "paper" else QUICK
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None
    if workers < 1:
        raise UserError(f"give at least one worker, got {workers}")
    if "choose" in stages:
        _choose(tasks, STEPS[preset], out, backbones, workers, say)
    if "test" in stages:
        if not (out / "settings.json").is_file():
            raise UserError("settings are chosen before the test is opened: run the stage choose first")
        _test(tasks, SEEDS[preset], STEPS[preset], out, backbones, device, workers, say)
    if "scratch" in stages and preset == "paper":
        _test(SCRATCH, SEEDS[preset], FROM_SCRATCH, out, backbones, device, workers, say)
    text = tables(out)
    (out / "results.md").write_text(text, encoding="utf-8")
    if "report" in stages:
        picture(out)
    return text


def _all(jobs: list[Job], do: Callable[..., Any], workers: int) -> Iterator[Any]:
    """Results as they come."""
    if workers == 1:
        yield from (do(*job) for job in jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(do, *job) for job in jobs]))


def _choose(tasks: tuple[Task, ...], steps: int, out: Path, backbones: Path, workers: int, say: Say) -> None:
    """For each dataset, by its first partition, each view and row: the settings that do best on stand-ins."""
    path, tries = out / "settings.json", out / "tries.jsonl"
    if path.is_file():
        return
    first = {task.name: task for task in reversed(tasks)}
    known = {(t["task"], t["view"], t["row"], t["way"], t["clip"]): t for t in _lines(tries)}
    jobs: list[Job] = [
        (task, backbones, view, row, settings, steps)
        for settings in GRID
        for task in first.values()
        for view in VIEWS
        for row in tuned(view)
        if (task.name, view, row, settings["way"], settings["clip"]) not in known
    ]
    for found in _all(jobs, _tried, workers):
        _append(tries, [found])
    chosen: dict[str, Any] = {}
    for found in sorted(_lines(tries), key=lambda t: (t["public"], -t["way"])):  # the best is written last
        own = chosen.setdefault(found["task"], {}).setdefault(found["view"], {})
        own[found["row"]] = {"way": found["way"], "clip": found["clip"]}
    path.write_text(json.dumps(chosen, indent=1, sort_keys=True) + "\n")
    say(f"settings: {path}")


def _tried(task: Task, backbones: Path, view: str, row: str, settings: dict[str, float], steps: int) -> Any:
    """A row with these settings: the mean accuracy over stand-ins."""
    torch.set_num_threads(1)
    small = [_small(task, backbones, fold, steps, view) for fold in range(STAND_INS)]
    played = [play(on, row, settings, view)["accuracy"] for on in small]
    return {"task": task.name, "view": view, "row": row, **settings, "public": statistics.fmean(played)}


@lru_cache(maxsize=4 * STAND_INS)
def _small(task: Task, backbones: Path, fold: int, steps: int, view: str) -> Stage:
    most = CERTIFIED if view == SUM else math.inf
    return stage(stand_in(task, backbones, fold, steps, most), steps, fold, "cpu")


def _test(
    tasks: tuple[Task, ...],
    seeds: int,
    steps: int,
    out: Path,
    backbones: Path,
    device: str,
    workers: int,
    say: Say,
) -> None:
    """Some rows of a division at a time, so that many can work at once; what is stored is not played again."""
    stored = out / "settings.json"
    chosen = json.loads(stored.read_text()) if stored.is_file() else {}
    path = out / "results.jsonl"
    done = {(r["task"], r["seed"], r["view"], r["row"]) for r in _lines(path)}
    jobs: list[Job] = []
    for seed in range(seeds):
        for task in tasks:
            rows = [(view, name) for view in VIEWS for name in names(view, seed, task.scratch)]
            left = [row for row in rows if (task.key, seed, *row) not in done]
            parts = [left[i : i + AT_ONCE] for i in range(0, len(left), AT_ONCE)]
            jobs += [
                (task, backbones, chosen.get(task.name, {}), seed, steps, device, out, part) for part in parts
            ]
    for task in {t.name: t for t in tasks if not t.scratch and jobs}.values():
        stage(private(task, backbones, 0), steps, 0, "cpu", _head(out, task))  # the same in every draw
    for played in _all(jobs, _cells, workers):
        _append(path, played)
        say(f"{played[0]['task']}, seed {played[0]['seed']}: {len(played)} rows")


def _cells(
    task: Task,
    backbones: Path,
    chosen: dict[str, Any],
    seed: int,
    steps: int,
    device: str,
    out: Path,
    rows: list[tuple[str, str]],
) -> list[dict[str, Any]]:
    """Some rows of the tables on one division."""
    torch.set_num_threads(1)
    on = _whole(task, backbones, steps, seed, device, out)

    def found(view: str, name: str) -> dict[str, Any]:
        if name == GATE:
            return probe(on)
        if name == PUBLIC:
            return public_alone(on)
        if name == AS_PRINTED:
            return play(on, name, {}, view, min(PRINTED, steps))
        row = OURS if name in TABLE_II else name
        return play(on, name, chosen[view].get(row, {}) if name != AUTO else {}, view)

    return [
        {"task": task.key, "seed": seed, "view": view, "row": name, **found(view, name)} for view, name in rows
    ]


@lru_cache(maxsize=1)
def _whole(task: Task, backbones: Path, steps: int, seed: int, device: str, out: Path) -> Stage:
    return stage(private(task, backbones, seed), steps, seed, device, _head(out, task))


def _head(out: Path, task: Task) -> Path:
    return out / f"public-head-{task.name}.npz"


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
