"""`modicum bench attacks`: reconstruction and membership for every method, cell by cell; what is there is kept."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from modicum.attacks.campaign import Report
from modicum.comparing.workers import Progress, work
from modicum.data.arrays import Dataset
from modicum.errors import UserError
from modicum.models.catalogue import names
from modicum_bench.attacks.cells import (
    CURVE,
    RESNET,
    ROWS,
    SIZES,
    Row,
    Size,
    dataset,
    members,
    path_of,
    reconstruct,
)
from modicum_bench.attacks.pictures import draw_all
from modicum_bench.attacks.tables import noise_table, table

INVERSIONS = ("ig", "dlg", "bayes", "gi")
MEMBERSHIP = ("matched", "lr", "quantile", "quantile-unseen")
TASKS = {"quick": ("fashion-mnist",), "paper": ("fashion-mnist", "cifar-10", "svhn")}
TABLES = ("reconstruction", "noise", "membership", "resnet18")
NETWORKS = {"reconstruction": "lenet-sigmoid", "membership": "lenet", "noise": "mlp", "resnet18": "resnet18"}
"""Inverted is one that attacks work on undefended; the curve's hides nothing: its first layer is linear."""
KNOWN = {row.name: row for row in (*ROWS, *CURVE, *RESNET)}


@dataclass(frozen=True)
class Job:
    """One attack on one row's run: a cell."""

    table: str
    task: str
    row: str
    attack: str
    seed: int
    model: str
    size: Size
    out: Path
    data_dir: Path | None
    device: str
    until: float  # by the clock of `time.time`: nothing begins later

    @property
    def path(self) -> Path:
        """Of what was found."""
        return path_of(self.out, self.table, self.task, self.row, self.attack, self.seed)


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
) -> str:
    """Fill what is missing of the tables in `out` until `seconds` have passed, then write them as Markdown."""
    _refuse(tables, model, workers)
    size, tasks, until = size or SIZES[preset], tuple(only) or TASKS[preset], time.time() + seconds
    out.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(name, task, row.name, attack, seed, model or NETWORKS[name], how, out, data_dir, device, until)
        for name in tables
        for task in tasks
        for row, attack, seed, how in _cells(name, task, tasks, size)
    ]
    for _ in work(_play, jobs, workers=workers, progress=progress):
        pass
    text = "\n\n".join(_written(jobs, name, task) for name in tables for task in tasks if _any(jobs, name, task))
    (out / "attacks.md").write_text(text + "\n", encoding="utf-8")
    draw_all(out, tasks)
    return text


def _refuse(tables: Sequence[str], model: str | None, workers: int) -> None:
    for kind, asked, there in (("table", tables, TABLES), ("model", [model] if model else [], names())):
        if unknown := [name for name in asked if name not in there]:
            raise UserError(f"unknown {kind} {unknown[0]!r}: use {', '.join(there)}")
    if workers < 1:
        raise UserError("give at least one worker")


def _cells(name: str, task: str, tasks: Sequence[str], size: Size) -> Iterator[tuple[Row, str, int, Size]]:
    """(row, attack, seed, size) of one table: one attack on every row before the next."""
    if name == "reconstruction":
        yield from ((row, attack, 0, size) for attack in INVERSIONS for row in ROWS if not row.instead)
        yield from ((row, attack, 0, size) for row in ROWS for attack in row.instead)
    elif name == "membership":
        rows = [row for row in ROWS if not row.instead]
        yield from (
            (row, attack, seed, size) for attack in MEMBERSHIP for seed in range(size.seeds) for row in rows
        )
    elif name == "noise" and task == tasks[0]:
        yield from ((row, "bayes", 0, size) for row in CURVE)
    elif name == "resnet18" and task == "cifar-10":  # one message of four records for each attack
        one = replace(size, targets=1, batch=4, others=400, effort="quick")
        yield from ((row, attack, 0, one) for row in RESNET for attack in ("ig", "bayes", "gi", "idlg"))


def _play(job: Job) -> None:
    """One cell into its file, with pictures beside it."""
    if job.path.exists() or time.time() > job.until:
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as passing:
        try:
            found = _report(job, Path(passing))
        except UserError as why:
            told: dict[str, Any] = {"attack": job.attack, "note": str(why), "verdict": "not tried"}
        else:
            told = found.outcomes[0].to_dict()
            _keep_pictures(job.path.with_suffix(".npz"), found)
    told["seconds"] = round(time.monotonic() - began, 1)
    part = job.path.with_suffix(".part")
    part.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    part.replace(job.path)


def _report(job: Job, folder: Path) -> Report:
    data = _dataset(job.task, job.data_dir)
    play = members if job.table == "membership" else reconstruct
    return play(KNOWN[job.row], data, job.model, job.size, job.attack, folder, job.device, job.seed)


_dataset: Callable[[str, Path | None], Dataset] = lru_cache(maxsize=1)(
    dataset
)  # a process plays many cells of one


def _keep_pictures(path: Path, found: Report) -> None:
    if found.picture is None:
        return
    (guessed,) = found.picture.found.values()
    images = {"original": found.picture.original, "public mean": found.picture.floor, "found": guessed}
    np.savez_compressed(path, **{name: value.numpy() for name, value in images.items()})  # type: ignore[arg-type]


def _any(jobs: Sequence[Job], name: str, task: str) -> bool:
    return any(job.table == name and job.task == task for job in jobs)


def _written(jobs: Sequence[Job], name: str, task: str) -> str:
    found: dict[tuple[str, str], list[dict[str, Any] | None]] = {}
    for job in jobs:
        if job.table == name and job.task == task:
            kept = json.loads(job.path.read_text(encoding="utf-8")) if job.path.exists() else None
            found.setdefault((job.row, job.attack), []).append(kept)
    return noise_table(task, found) if name == "noise" else table(name, task, found)
