"""A task's features in six bits, turned and with each cell's geometry, to carry them to another machine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from modicum.data.arrays import Arrays, Dataset
from modicum.data.geometry import Geometry
from modicum_bench.leaderboard.grid import Cell, Task

REACH, STEPS = 4.0, 31  # six bits: steps up to so many standard deviations of public records


def packed(task: Task, folder: Path) -> Path:
    return folder / f"{task.name.replace(':', '-')}-packed.npz"


def pack(
    task: Task, records: Dataset, source: Dataset, fitted: Iterable[tuple[Cell, Geometry]], path: Path
) -> None:
    """Geometries of one source differ in their number of dimensions alone: records are turned by the largest."""
    known = dict(fitted)
    largest = max(known.values(), key=lambda g: g.size)

    def turned(arrays: Arrays) -> np.ndarray:
        found: np.ndarray = (arrays.scaled().reshape(len(arrays), -1) - largest.mean) @ largest.matrix
        return found

    scale = (REACH * turned(source.train).std(0) / STEPS).astype(np.float32)
    parts = {"train": records.train, "test": records.test}
    coded = {k: np.clip(np.round(turned(a) / scale), -STEPS, STEPS).astype(np.int8) for k, a in parts.items()}
    labels = {f"y_{k}": a.y.astype(np.uint8) for k, a in parts.items()}
    about = {"name": np.array(task.name), "classes": np.array(records.classes), "note": np.array(records.note)}
    spectra = {_key(cell): np.stack([g.between, g.within]) for cell, g in known.items()}
    np.savez_compressed(path, scale=scale, **coded, **labels, **about, **spectra)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def unpack(path: Path) -> Dataset:
    with np.load(path) as file:
        train, test = (
            Arrays(file[k].astype(np.float32) * file["scale"], file[f"y_{k}"].astype(np.int64))
            for k in ("train", "test")
        )
        return Dataset(str(file["name"]), train, test, int(file["classes"]), note=str(file["note"]))


def geometry_of(path: Path, cell: Cell) -> Geometry:
    """The cell's own geometry, over records that are turned already."""
    with np.load(path) as file:
        size = len(file["scale"])
        between, within = file[_key(cell)]
    about = {"kind": "discriminant", "records": 0, "source": "packed", "classes": 0}
    matrix = np.eye(size, len(between), dtype=np.float32)
    return Geometry(np.zeros(size, np.float32), matrix, between, within, about)


def _key(cell: Cell) -> str:
    return f"cell {cell.name}"
