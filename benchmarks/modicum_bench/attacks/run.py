"""`modicum bench attacks`: reconstruction and membership for every method, cell by cell; what is there is kept."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from modicum.attacks.campaign import Stage, stage_of
from modicum.attacks.order import INVERSIONS as ALL_INVERSIONS
from modicum.attacks.order import Order
from modicum.comparing.workers import Progress, work
from modicum.data.arrays import Dataset
from modicum.errors import UserError
from modicum.federation.experiment import Experiment
from modicum.federation.transcript import Seen
from modicum.models.catalogue import names
from modicum_bench.attacks.cells import (
    CURVE,
    RESNET,
    ROWS,
    SIZES,
    Size,
    dataset,
    first_messages,
    path_of,
    recorded,
    whole_run,
)
from modicum_bench.attacks.pictures import draw_all
from modicum_bench.attacks.tables import noise_table, table
from modicum_bench.attacks.together import duplicate_of, search_together
from modicum_bench.attacks.under import under

INVERSIONS = ("ig", "dlg", "bayes", "gi")
MEMBERSHIP = ("matched", "lr", "quantile", "quantile-unseen")
DEEP = ("ig", "bayes", "gi", "idlg")  # on ResNet-18
TASKS = {"quick": ("fashion-mnist",), "paper": ("fashion-mnist", "cifar-10", "svhn")}
POOLED = ("matched", "lr", "lira")  # on so many splits that 0.1% is supported
TABLES = ("reconstruction", "noise", "membership", "pooled", "resnet18")
WHO = ("membership", "pooled")  # tables that ask who was in a run
NETWORKS = {
    "reconstruction": "lenet-sigmoid",
    "membership": "lenet",
    "pooled": "logistic",
    "noise": "mlp",
    "resnet18": "resnet18",
}
"""Inverted is one that attacks work on undefended; the curve's hides nothing: its first layer is linear. What is
played on many splits is small."""
PLAYED = ("reconstruction", "membership", "resnet18", "noise", "pooled")
"""In this order: the longest pieces first, so that no process is left alone with one, and those that keep a GPU
busy beside those that do not."""
TIMES = "times.jsonl"  # what each piece of work took
KNOWN = {row.name: row for row in (*ROWS, *CURVE, *RESNET)}


@dataclass(frozen=True)
class Job:
    """Some attacks on some rows' runs: cells that are played together."""

    table: str
    task: str
    rows: tuple[str, ...]
    attacks: tuple[str, ...]
    seed: int
    model: str
    size: Size
    out: Path
    data_dir: Path | None
    device: str
    until: float  # by the clock of `time.time`: nothing begins later

    def path(self, row: str, attack: str) -> Path:
        """Of what was found in one cell."""
        return path_of(self.out, self.table, self.task, row, attack, self.seed)

    def left(self, attack: str) -> tuple[str, ...]:
        """Rows whose cell of this attack is not there."""
        return tuple(row for row in self.rows if not self.path(row, attack).exists())


def bench(
    preset: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    tables: Sequence[str] = TABLES,
    data_dir: Path | None = None,
    device: str = "cpu",
    seconds: float = 1e6,
    workers: int = 1,
    progress: Progress | None = None,
    size: Size | None = None,
    model: str | None = None,
    batch: int | None = None,
) -> str:
    """Fill what is missing of the tables in `out` until `seconds` have passed, then write them as Markdown."""
    _refuse(tables, model, workers)
    size, tasks, until = size or SIZES[preset], tuple(only) or TASKS[preset], time.time() + seconds
    size = size if batch is None else replace(size, batch=batch)
    for task in tasks:
        _dataset(task, data_dir)  # a dataset that is missing is refused before anything is played
    out.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(name, task, rows, attacks, seed, model or NETWORKS[name], how, out, data_dir, device, until)
        for name in tables
        for task in tasks
        for rows, attacks, seed, how in _jobs(name, task, tasks, size)
    ]
    pieces = sorted(jobs, key=lambda job: PLAYED.index(job.table))
    for _ in work(_play, pieces, workers=workers, progress=progress):
        pass
    text = "\n\n".join(_written(jobs, name, task) for name in tables for task in tasks if _any(jobs, name, task))
    text += f"\n\n{under(out)}\n\n{_spent(out)}"
    (out / "attacks.md").write_text(text + "\n", encoding="utf-8")
    draw_all(out, tasks)
    return text


def _spent(out: Path) -> str:
    """Seconds of each table, over all processes."""
    spent: dict[str, float] = {}
    lines = (out / TIMES).read_text(encoding="utf-8").splitlines() if (out / TIMES).exists() else []
    for name, *_, seconds in map(json.loads, lines):
        spent[name] = spent.get(name, 0.0) + seconds
    each = "; ".join(f"{name} {seconds:,.0f}" for name, seconds in spent.items())
    return f"Seconds of all processes together: {sum(spent.values()):,.0f} ({each})."


def _refuse(tables: Sequence[str], model: str | None, workers: int) -> None:
    for kind, asked, there in (("table", tables, TABLES), ("model", [model] if model else [], names())):
        if unknown := [name for name in asked if name not in there]:
            raise UserError(f"unknown {kind} {unknown[0]!r}: use {', '.join(there)}")
    if workers < 1:
        raise UserError("give at least one worker")


Cells = tuple[tuple[str, ...], tuple[str, ...], int, Size]  # rows, attacks, seed


def _jobs(name: str, task: str, tasks: Sequence[str], size: Size) -> Iterator[Cells]:
    """Inversions search all rows' messages at once; a run is played once for all attacks on it."""
    plain = tuple(row.name for row in ROWS if not row.instead)
    if name == "reconstruction":
        yield plain, INVERSIONS, 0, size
        yield from (((row.name,), row.instead, 0, size) for row in ROWS if row.instead)
    elif name == "membership":
        yield from (((row,), MEMBERSHIP, 0, size) for row in plain)
    elif name == "pooled" and task == tasks[0] and size.splits > 1:
        yield from (((row,), POOLED, seed, size) for seed in range(size.splits) for row in plain)
    elif name == "noise" and task == tasks[0]:
        yield tuple(row.name for row in CURVE), ("bayes",), 0, size
    elif name == "resnet18" and task == "cifar-10":
        one = replace(size, targets=4, others=400, effort="large")
        yield from ((tuple(row.name for row in RESNET), (attack,), 0, one) for attack in DEEP)


def _play(job: Job) -> None:
    """Cells into their files, with pictures beside them."""
    left = dict.fromkeys(row for attack in job.attacks for row in job.left(attack))
    if not left or time.time() > job.until:
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as passing:
        stages = {row: found for row in left if (found := _stage(job, row, Path(passing))) is not None}
        for attack in job.attacks:
            asked = [row for row in job.left(attack) if row in stages]
            if asked and time.time() <= job.until:
                _try(job, {row: stages[row] for row in asked}, attack)
        stages.clear()
        gc.collect()  # graphs hold GPU memory and refer to each other: a process that plays many would keep all
    took = round(time.monotonic() - began, 1)
    line = [job.table, job.task, list(job.rows), list(job.attacks), job.seed, took]
    with open(job.out / TIMES, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _stage(job: Job, row: str, folder: Path) -> Stage | None:
    """A row's run, recorded, with what an attack on it needs; None where it is refused, and its cells say why."""
    key = (job.table, job.task, row, job.model, job.size, job.seed, job.data_dir, job.device)
    try:
        made, seen = _recorded(*key)
        targets = job.size.targets if job.table not in WHO else 1
        order = Order(job.attacks, targets, job.size.effort, KNOWN[row].party, job.seed, False, job.device)
        return stage_of(made, seen, order, folder / str(len(list(folder.iterdir()))))
    except UserError as why:
        for attack in job.attacks:
            _write(job.path(row, attack), {"attack": attack, "note": str(why), "verdict": "not tried"})
        return None


def _recorded(
    table: str, task: str, row: str, model: str, size: Size, seed: int, data_dir: Path | None, device: str
) -> tuple[Experiment, tuple[Seen, ...]]:
    data = _dataset(task, data_dir)
    made = (whole_run if table in WHO else first_messages)(KNOWN[row], data, model, size, seed)
    with tempfile.TemporaryDirectory() as passing:
        played = replace(made, device=device) if table in WHO else made
        return made, tuple(recorded(played, Path(passing) / "run").seen)


def _try(job: Job, stages: Mapping[str, Stage], attack: str) -> None:
    """One attack on all rows; what a search finds in messages that two rows share, it finds once."""
    began, rows, all_of_them = time.monotonic(), list(stages), list(stages.values())
    searched = attack in ALL_INVERSIONS
    if searched:
        search_together(all_of_them, attack)
    for place, (row, stage) in enumerate(stages.items()):
        told = stage.outcome(attack).to_dict()
        other = duplicate_of(all_of_them, place) if searched else None
        if other is not None:
            told["same_messages_as"] = rows[other]
        told["seconds"] = round((time.monotonic() - began) / (place + 1), 1)
        if searched:
            _keep_pictures(job.path(row, attack).with_suffix(".npz"), stage)
        _write(job.path(row, attack), told)


def _write(path: Path, told: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    part.replace(path)


_dataset: Callable[[str, Path | None], Dataset] = lru_cache(maxsize=3)(
    dataset
)  # a process plays many cells of each


def _keep_pictures(path: Path, stage: Stage) -> None:
    picture = stage.picture()
    if picture is not None:
        *_, guessed = picture.found.values()  # by the last attack
        images = {"original": picture.original, "public mean": picture.floor, "found": guessed}
        np.savez_compressed(path, **{name: value.numpy() for name, value in images.items()})  # type: ignore[arg-type]


def _any(jobs: Sequence[Job], name: str, task: str) -> bool:
    return any(job.table == name and job.task == task for job in jobs)


def _written(jobs: Sequence[Job], name: str, task: str) -> str:
    found: dict[tuple[str, str], list[dict[str, Any] | None]] = {}
    for job in jobs:
        if job.table == name and job.task == task:
            for cell in product(job.rows, job.attacks):
                path = job.path(*cell)
                kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
                found.setdefault(cell, []).append(kept)
    return noise_table(task, found) if name == "noise" else table(name, task, found, asked=name in WHO)
