"""Tiny files in the publishers' own formats."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np


def write_idx(path: Path, values: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_mnist(folder: Path, *, suffix: str = ".gz", n: int = 40) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (n, 28, 28))
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", np.arange(n) % 10)
    return images


def write_emnist(folder: Path, split: str, labels: np.ndarray) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28))
    for part in ("train", "test"):
        write_idx(folder / f"emnist-{split}-{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"emnist-{split}-{part}-labels-idx1-ubyte.gz", labels)
    return images


def write_cifar(folder: Path, classes: int, *, n: int = 20) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    data = np.random.default_rng(0).integers(0, 256, (n, 3072)).astype(np.uint8)
    label = b"labels" if classes == 10 else b"fine_labels"
    for name in names:
        batch = {b"data": data, label: [i % classes for i in range(n)], b"filenames": [b"a.png"] * n}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return data


def write_svhn(folder: Path) -> np.ndarray:
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 10)).astype(np.uint8)
    for part in ("train", "test"):
        savemat(folder / f"{part}_32x32.mat", {"X": x, "y": np.arange(1, 11, dtype=np.uint8)[:, None]})
    return x


PATIENT = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,{diagnosis}\n"


def write_heart(folder: Path, *, rows: int = 30) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        lines = [PATIENT.format(diagnosis=i % 5) for i in range(rows)]
        (folder / f"processed.{hospital}.data").write_text("".join(lines))
