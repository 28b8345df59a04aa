"""`modicum bench attacks`: reconstruction and membership for every method, cell by cell; what is there is kept."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from modicum.attacks.campaign import Report
from modicum.errors import UserError
from modicum_bench.attacks.cells import CURVE, RESNET, ROWS, SIZES, Row, Size, dataset, members, reconstruct
from modicum_bench.attacks.pictures import draw_all
from modicum_bench.attacks.tables import noise_table, table

INVERSIONS = ("ig", "gi", "bayes", "analytic")
MEMBERSHIP = ("matched", "lr", "quantile", "quantile-unseen")
TASKS = {"quick": ("fashion-mnist",), "paper": ("fashion-mnist", "cifar-10", "svhn")}
TABLES = ("reconstruction", "noise", "membership", "resnet18")
KNOWN = {row.name: row for row in (*ROWS, *CURVE, *RESNET)}
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """One cell."""

    table: str
    task: str
    row: str
    seed: int
    model: str
    attacks: tuple[str, ...]
    size: Size
    out: Path
    data_dir: Path | None
    device: str
    until: float  # by the clock of `time.time`: nothing begins later

    @property
    def path(self) -> Path:
        """Of what was found."""
        return path_of(self.out, self.table, self.task, self.row, self.seed)


def path_of(out: Path, name: str, task: str, row: str, seed: int) -> Path:
    """The file of one cell."""
    return out / f"{name}-{task}-{row.replace(', ', '-').replace(' ', '-')}-{seed}.json"


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
    model: str = "lenet",
) -> str:
    """Fill what is missing of the tables in `out` until `seconds` have passed, then write them as Markdown."""
    unknown = [name for name in tables if name not in TABLES]
    if unknown or workers < 1:
        raise UserError(
            f"unknown table {unknown[0]!r}: use {', '.join(TABLES)}" if unknown else "give at least one worker"
        )
    size, tasks, until = size or SIZES[preset], tuple(only) or TASKS[preset], time.time() + seconds
    out.mkdir(parents=True, exist_ok=True)
    jobs = [
        Job(name, task, row.name, seed, network, attacks, how, out, data_dir, device, until)
        for name in tables
        for task in tasks
        for row, seed, network, attacks, how in _cells(name, task, tasks, size, model)
    ]
    for i, _ in enumerate(_all(jobs, workers), start=1):
        if progress is not None:
            progress(i, len(jobs))
    text = "\n\n".join(_written(jobs, name, task) for name in tables for task in tasks if _any(jobs, name, task))
    (out / "attacks.md").write_text(text + "\n", encoding="utf-8")
    draw_all(out, tasks)
    return text


def _cells(
    name: str, task: str, tasks: Sequence[str], size: Size, model: str
) -> Iterator[tuple[Row, int, str, tuple[str, ...], Size]]:
    """(row, seed, network, attacks, size) of one table."""
    if name == "reconstruction":
        yield from ((row, 0, model, INVERSIONS, size) for row in ROWS)
    elif name == "membership":
        rows = [row for row in ROWS if not row.instead]
        yield from ((row, seed, model, MEMBERSHIP, size) for seed in range(size.seeds) for row in rows)
    elif name == "noise" and task == tasks[0]:  # on a network that hides nothing: its first layer is linear
        yield from ((row, 0, "mlp", ("bayes",), size) for row in CURVE)
    elif name == "resnet18" and task == "cifar-10":  # one message of four records for each attack
        one = replace(size, targets=1, batch=4, effort="quick")
        yield from ((row, 0, name, (row.name.rpartition(" ")[2],), one) for row in RESNET)


def _all(jobs: Sequence[Job], workers: int) -> Iterator[None]:
    if workers == 1:
        yield from map(_play, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_play, jobs)


def _play(job: Job) -> None:
    """One cell into its file, with pictures beside it."""
    if job.path.exists() or time.time() > job.until:
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as passing:
        try:
            found = _report(job, Path(passing))
        except UserError as why:
            told: list[dict[str, Any]] = [{"attack": "all", "note": str(why), "verdict": "not tried"}]
        else:
            told = [outcome.to_dict() for outcome in found.outcomes]
            _keep_pictures(job.path.with_suffix(".npz"), found)
    for one in told:
        one["seconds"] = round((time.monotonic() - began) / len(told), 1)
    part = job.path.with_suffix(".part")
    part.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    part.replace(job.path)


def _report(job: Job, folder: Path) -> Report:
    data = dataset(job.task, job.data_dir)
    play = members if job.table == "membership" else reconstruct
    return play(KNOWN[job.row], data, job.model, job.size, job.attacks, folder, job.device, job.seed)


def _keep_pictures(path: Path, found: Report) -> None:
    if found.picture is None:
        return
    attacks = {name.partition(",")[0]: images for name, images in found.picture.found.items()}
    images = {"original": found.picture.original, "public mean": found.picture.floor, **attacks}
    np.savez_compressed(path, **{name: value.numpy() for name, value in images.items()})  # type: ignore[arg-type]


def _any(jobs: Sequence[Job], name: str, task: str) -> bool:
    return any(job.table == name and job.task == task for job in jobs)


def _written(jobs: Sequence[Job], name: str, task: str) -> str:
    found: dict[str, list[list[dict[str, object]] | None]] = {}
    for job in jobs:
        if job.table == name and job.task == task:
            kept = json.loads(job.path.read_text(encoding="utf-8")) if job.path.exists() else None
            found.setdefault(job.row, []).append(kept)
    return noise_table(task, found) if name == "noise" else table(name, task, found)
