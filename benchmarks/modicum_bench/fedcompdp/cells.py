"""A try on public stand-ins and a cell of the tables: what one process does by itself, and what it keeps."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from modicum_bench.fedcompdp.play import PRINTED, Stage, play, probe, public_alone, stage
from modicum_bench.fedcompdp.rows import AS_PRINTED, GATE, PUBLIC, SUM, Settings
from modicum_bench.fedcompdp.tasks import Task, private, stand_in

STAND_INS = 3
CERTIFIED = 40.0  # the largest ε, about, that is certified of integer noise, as sums have it
Found = dict[str, Any]


@dataclass(frozen=True)
class Try:
    """A row with settings that may be chosen."""

    task: Task
    backbones: Path
    view: str
    row: str
    settings: Settings
    steps: int


@dataclass(frozen=True)
class Cell:
    """A row on one division of a task, with the settings that were chosen for it."""

    task: Task
    backbones: Path
    seed: int
    view: str
    row: str
    settings: Settings
    steps: int
    device: str
    out: Path

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What tells it from others in a file of results."""
        return self.task.key, self.seed, self.view, self.row


def tried(one: Try) -> Found:
    """The mean accuracy over stand-ins."""
    small = [_small(one.task, one.backbones, fold, one.steps, one.view) for fold in range(STAND_INS)]
    accuracy = statistics.fmean(play(on, one.row, one.settings, one.view)["accuracy"] for on in small)
    return {"task": one.task.name, "view": one.view, "row": one.row, **one.settings, "public": accuracy}


@lru_cache(maxsize=4 * STAND_INS)
def _small(task: Task, backbones: Path, fold: int, steps: int, view: str) -> Stage:
    most = CERTIFIED if view == SUM else math.inf
    return stage(stand_in(task, backbones, fold, steps, most), steps, fold, "cpu")


def played(cell: Cell) -> Found:
    """Accuracy and macro-F1 on test records, and the true ε of what is private."""
    on = _whole(cell.task, cell.backbones, cell.steps, cell.seed, cell.device, cell.out)
    found = {"task": cell.task.key, "seed": cell.seed, "view": cell.view, "row": cell.row}
    if cell.row == GATE:
        return found | probe(on)
    if cell.row == PUBLIC:
        return found | public_alone(on)
    rounds = min(PRINTED, cell.steps) if cell.row == AS_PRINTED else None
    return found | play(on, cell.row, cell.settings, cell.view, rounds)


@lru_cache(maxsize=1)
def _whole(task: Task, backbones: Path, steps: int, seed: int, device: str, out: Path) -> Stage:
    return stage(private(task, backbones, seed), steps, seed, device, head_file(out, task))


def head_file(out: Path, task: Task) -> Path:
    """Where a task's public head is kept: it is the same in every division."""
    return out / f"public-head-{task.features}.npz"
