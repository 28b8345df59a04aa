"""Stages of `modicum bench fedcompdp`: choose settings on public stand-ins, play the task, write tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from modicum.errors import UserError
from modicum_bench.fedcompdp.play import play, prepared_for, probe, start
from modicum_bench.fedcompdp.report import tables
from modicum_bench.fedcompdp.rows import (
    AS_PRINTED,
    FAITHFUL,
    GATE,
    GRID,
    NAMES,
    PLAINEST,
    POWERS,
    PUBLIC,
    TABLE_I,
    TABLE_II,
    rounds_of,
    spec,
)
from modicum_bench.fedcompdp.tasks import PAPER, QUICK, Task, private, stand_in

STAGES = ("choose", "test", "report")
SEEDS, STEPS = {"quick": 1, "paper": 3}, {"quick": 10, "paper": 30}
PRINTED = 5  # rounds of the faithful row
STAND_INS = 2
AT_ONCE = 5  # rows of a division that one process plays
Job = tuple[Any, ...]


def bench(
    preset: str,
    stages: list[str],
    out: Path,
    backbones: Path,
    device: str = "cpu",
    workers: int = 1,
    say: Callable[[str], None] = print,
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
        _choose(tasks, STEPS[preset], out / "settings.json", backbones, device, workers, say)
    if "test" in stages:
        if not (out / "settings.json").is_file():
            raise UserError("settings are chosen before the test is opened: run the stage choose first")
        _test(tasks, SEEDS[preset], STEPS[preset], out, backbones, device, workers, say)
    text = tables(out)
    (out / "results.md").write_text(text, encoding="utf-8")
    return text


def _all(jobs: list[Job], do: Callable[..., Any], workers: int) -> Iterator[Any]:
    if workers == 1:
        yield from (do(*job) for job in jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(do, *zip(*jobs, strict=True))


def _choose(
    tasks: tuple[Task, ...],
    steps: int,
    path: Path,
    backbones: Path,
    device: str,
    workers: int,
    say: Callable[[str], None],
) -> None:
    """For each dataset, by its first partition: the power by the plainest row, then each row's own settings."""
    chosen: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for task in {t.name: t for t in reversed(tasks) if t.name not in chosen}.values():
        jobs: list[Job] = [(task, backbones, power, PLAINEST, steps, device) for power in POWERS]
        powers = list(_all(jobs, _tried, workers))
        power = max(powers, key=lambda found: found["public"])["power"]
        jobs = [(task, backbones, power, row, steps, device) for row in TABLE_I if row != PLAINEST]
        rows = [*(p for p in powers if p["power"] == power), *_all(jobs, _tried, workers)]
        for found in rows:
            say(f"{task.name} {found['row']}: {found['settings']} {found['public']:.4f}")
        settings = {found["row"]: found["settings"] for found in rows}
        chosen[task.name] = {"power": power, "settings": settings, "tried": [*powers, *rows]}
        path.write_text(json.dumps(chosen, indent=1) + "\n")


def _tried(task: Task, backbones: Path, power: float, row: str, steps: int, device: str) -> dict[str, Any]:
    """The best of the row's settings, by the mean over two stand-ins."""
    torch.set_num_threads(1)
    found = []
    feds = [stand_in(task, backbones, power, seed, steps) for seed in range(STAND_INS)]
    ready = [prepared_for(fed, spec(row, dict(GRID[0])), 0, device) for fed in feds]
    for settings in GRID:
        rounds, made = rounds_of(row, steps), spec(row, dict(settings))
        played = [play(fed, made, rounds, 0, device, own) for fed, own in zip(feds, ready, strict=True)]
        found.append((statistics.fmean(p["accuracy"] for p in played), settings))
    best = max(found, key=lambda pair: pair[0])
    everything = [{**settings, "public": public} for public, settings in found]
    return {"row": row, "power": power, "settings": best[1], "public": best[0], "all": everything}


def _test(
    tasks: tuple[Task, ...],
    seeds: int,
    steps: int,
    out: Path,
    backbones: Path,
    device: str,
    workers: int,
    say: Callable[[str], None],
) -> None:
    """Some rows of a division at a time, so that many can work at once; what is stored is not played again."""
    chosen = json.loads((out / "settings.json").read_text())
    path = out / "results.jsonl"
    done = {(r["task"], r["seed"], r["row"]) for r in _lines(path)}
    jobs: list[Job] = []
    for seed in range(seeds):
        for task in tasks:
            left = [name for name in NAMES if (task.key, seed, name) not in done]
            left = [name for name in left if name != AS_PRINTED or seed == 0]
            parts = [left[i : i + AT_ONCE] for i in range(0, len(left), AT_ONCE)]
            jobs += [(task, backbones, chosen[task.name], seed, steps, device, part) for part in parts]
    for rows in _all(jobs, _cell, workers):
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        say(f"{rows[0]['task']}, seed {rows[0]['seed']}: {len(rows)} rows")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _cell(
    task: Task, backbones: Path, chosen: dict[str, Any], seed: int, steps: int, device: str, names: list[str]
) -> list[dict[str, Any]]:
    """Some rows of the tables on one division."""
    torch.set_num_threads(1)
    fed = private(task, backbones, chosen["power"], seed)
    ours = chosen["settings"]["FedCompDP"]
    plain = spec("FedCompDP", ours)
    prepared = prepared_for(fed, plain, seed, device)

    def found(name: str) -> dict[str, Any]:
        if name == GATE:
            return probe(fed, device)
        if name == PUBLIC:
            return start(prepared, fed, plain, seed, device)
        if name == AS_PRINTED:
            made = spec("FedCompDP", {**ours, **FAITHFUL})
            return play(fed, made, min(PRINTED, steps), seed, device, prepared)
        if name in TABLE_II:
            return play(fed, spec("FedCompDP", {**ours, **TABLE_II[name]}), steps, seed, device, prepared)
        made = spec(name, chosen["settings"][name])
        return play(fed, made, rounds_of(name, steps), seed, device, prepared)

    return [{"task": task.key, "seed": seed, "row": name, **found(name)} for name in names]
