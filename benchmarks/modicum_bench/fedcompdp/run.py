"""Stages of `modicum bench fedcompdp`: choose settings on public stand-ins, play the task, write tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from modicum.errors import UserError
from modicum_bench.fedcompdp.play import play, prepared_for, probe, start
from modicum_bench.fedcompdp.report import tables
from modicum_bench.fedcompdp.rows import FAITHFUL, TABLE_I, TABLE_II, choices, rounds_of, spec
from modicum_bench.fedcompdp.tasks import PAPER, QUICK, Task, private, stand_in

STAGES = ("choose", "test", "report")
POWERS = (0.0, 0.5, 1.0)
SEEDS, STEPS = {"quick": 1, "paper": 3}, {"quick": 10, "paper": 100}
FIRST = "FedSA"  # the plainest row: it decides what all share
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
    """The first partition of each dataset: the power of the spread by the plainest row, then each row's own."""
    chosen: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    new = {t.name: t for t in reversed(tasks) if t.name not in chosen}
    jobs: list[Job] = [(t, backbones, p, FIRST, steps, device) for t in new.values() for p in POWERS]
    powers = list(_all(jobs, _tried, workers))
    for name in new:
        own = [r for r in powers if r["task"] == name]
        chosen[name] = {"power": max(own, key=lambda r: r["best"]["public"])["power"], "tried": own}
    jobs = [(t, backbones, chosen[t.name]["power"], row, steps, device) for t in new.values() for row in TABLE_I]
    for found in _all(jobs, _tried, workers):
        chosen[found["task"]].setdefault("rows", {})[found["row"]] = found["best"]["settings"]
        chosen[found["task"]]["tried"].append(found)
        say(f"{found['task']} {found['row']}: {found['best']}")
    path.write_text(json.dumps(chosen, indent=1) + "\n")


def _tried(task: Task, backbones: Path, power: float, row: str, steps: int, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    fed = stand_in(task, backbones, power, seed=0)
    prepared = None
    tried = []
    for settings in choices():
        made = spec(row, settings)
        prepared = prepared or prepared_for(fed, made, 0, device)
        found = play(fed, made, rounds_of(row, steps), 0, device, prepared)
        tried.append({"public": found["accuracy"], "settings": settings})
    best = max(tried, key=lambda t: t["public"])
    return {"task": task.name, "row": row, "power": power, "best": best, "all": tried}


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
    chosen = json.loads((out / "settings.json").read_text())
    path = out / "results.jsonl"
    done = {(r["task"], r["seed"]) for r in _lines(path)}
    jobs: list[Job] = [
        (t, backbones, chosen[t.name], seed, steps, device)
        for t in tasks
        for seed in range(seeds)
        if (t.key, seed) not in done
    ]
    for rows in _all(jobs, _cell, workers):
        with open(path, "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
        say(f"{rows[0]['task']}, seed {rows[0]['seed']}: {len(rows)} rows")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _cell(
    task: Task, backbones: Path, chosen: dict[str, Any], seed: int, steps: int, device: str
) -> list[dict[str, Any]]:
    """All rows of both tables on one division."""
    torch.set_num_threads(1)
    fed = private(task, backbones, chosen["power"], seed)
    ours = chosen["rows"]["FedCompDP"]
    prepared = prepared_for(fed, spec("FedCompDP", ours), seed, device)
    about = {"task": task.key, "seed": seed, "records": [min(fed.data.sizes), max(fed.data.sizes)]}

    def row(table: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
        return {**about, "table": table, "row": name, **found}

    found = [
        row("gate", "linear head without privacy", probe(fed, device)),
        row("gate", "public records alone", start(prepared, fed, spec("FedCompDP", ours), seed, device)),
    ]
    for name in TABLE_I:
        made = spec(name, chosen["rows"][name])
        found.append(row("I", name, play(fed, made, rounds_of(name, steps), seed, device, prepared)))
    for name, change in TABLE_II.items():
        made = spec("FedCompDP", {**ours, **change})
        found.append(row("II", name, play(fed, made, rounds_of("FedCompDP", steps), seed, device, prepared)))
    if seed == 0:
        made = spec("FedCompDP", {**ours, **FAITHFUL})
        found.append(
            row("faithful", "FedCompDP as printed", play(fed, made, min(20, steps), seed, device, prepared))
        )
    return found
