"""Features of the tasks in few bits, to carry them to another machine.

    python -m modicum_bench.fedcompdp.pack --backbones FOLDER --out FOLDER

`modicum bench fedcompdp --backbones` takes the folder that is written in place of the one with backbones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from modicum.data.arrays import Arrays, Dataset

STEPS = 4  # to a standard deviation of public records: what is lost is half a percent of the variance


def pack(dataset: Dataset, scale: npt.NDArray[np.float32], path: Path) -> None:
    """Features as whole multiples, up to 127, of `scale`: a public step for each coordinate."""
    parts = {s: getattr(dataset, s) for s in ("train", "test")}
    coded = {s: np.clip(np.round(a.x / scale), -127, 127).astype(np.int8) for s, a in parts.items()}
    labels = {f"y_{s}": a.y.astype(np.uint8) for s, a in parts.items()}
    np.savez_compressed(path, scale=scale, **coded, **labels)


def unpack(name: str, path: Path) -> Dataset:
    """What was packed."""
    with np.load(path) as file:
        train, test = (
            Arrays(file[s].astype(np.float32) * file["scale"], file[f"y_{s}"].astype(np.int64))
            for s in ("train", "test")
        )
    return Dataset(name, train, test, classes=10)


def packed_file(folder: Path, name: str) -> Path:
    """Where a folder holds a dataset's packed features."""
    return folder / f"{name}-features.npz"


def main() -> None:
    """The command line: all tasks' features, in steps of their public records' spread."""
    from modicum_bench.fedcompdp.tasks import JOINED, PAPER, parted, records_of

    parser = argparse.ArgumentParser(prog="python -m modicum_bench.fedcompdp.pack", description="Pack features.")
    parser.add_argument("--backbones", type=Path, required=True, help="folder of backbones' weights")
    parser.add_argument("--out", type=Path, required=True, help="folder for the packed features")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for task in {t.features: t for t in (*PAPER, *JOINED)}.values():
        _, public = parted(task, given.backbones)
        scale = (public.x.std(0) / STEPS + 1e-6).astype(np.float32)
        pack(records_of(task, given.backbones), scale, packed_file(given.out, task.features))


if __name__ == "__main__":
    main()
