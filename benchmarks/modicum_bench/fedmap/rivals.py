"""The simple rivals beside a network trained from nothing: fixed or public features under a linear head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from modicum.data.arrays import Array, Arrays, Dataset
from modicum_bench.fedmap.cells import LARGE

ORIENTATIONS, CELL = 8, 4


def hog(images: Array) -> Array:
    """Histograms of oriented gradients of uint8 images (N, channels, height, width), each of length 1.

    Fixed before any data is seen: 4×4 cells, 8 unsigned orientations, contrast normalised over 2×2 cells.
    """
    gray = images.astype(np.float32).mean(1) / 255
    dy, dx = np.gradient(gray, axis=(1, 2))
    size, angle = np.hypot(dx, dy), np.mod(np.arctan2(dy, dx), np.pi) / np.pi * ORIENTATIONS
    low = np.floor(angle).astype(int) % ORIENTATIONS
    share = angle - np.floor(angle)
    n, height, width = gray.shape
    rows, columns = height // CELL, width // CELL
    cells = np.zeros((n, rows, columns, ORIENTATIONS), np.float32)
    for k in range(ORIENTATIONS):
        weight = size * (np.where(low == k, 1 - share, 0) + np.where((low + 1) % ORIENTATIONS == k, share, 0))
        cut = weight[:, : rows * CELL, : columns * CELL].reshape(n, rows, CELL, columns, CELL)
        cells[..., k] = cut.sum((2, 4))
    energy = np.square(cells).sum(-1)
    padded = np.pad(energy, ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = sum(padded[:, i : i + rows, j : j + columns] for i in (0, 1, 2) for j in (0, 1, 2))
    flat = (cells / np.sqrt(around + 1e-3)[..., None]).reshape(n, -1)
    return np.asarray(flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-6), np.float32)


def on_hog(dataset: Dataset, at_once: int = 5000) -> Dataset:
    def featured(arrays: Arrays) -> Arrays:
        parts = [hog(arrays.x[i : i + at_once]) for i in range(0, len(arrays), at_once)]
        return Arrays(np.concatenate(parts), arrays.y)

    return Dataset(f"{dataset.name} hog", featured(dataset.train), featured(dataset.test), dataset.classes)


def on_backbone(dataset: Dataset, backbone: Path, cache: Path) -> Dataset:
    """Features of a network that was trained on another, public dataset, each record of length 1 like `hog`'s."""
    from modicum.public.features import behind

    found = behind(backbone, cache, dataset, False, None, trained_on=(backbone.stem,))[0]  # as it is named after

    def unit(arrays: Arrays) -> Arrays:
        return Arrays(arrays.x / np.linalg.norm(arrays.x, axis=1, keepdims=True).clip(1e-6), arrays.y)

    return replace(found, train=unit(found.train), test=unit(found.test))


def loader(load: Callable[[str], Dataset], backbone: Path | None, cache: Path) -> Callable[[str], Dataset]:
    """By a task's name: "svhn hog", "cifar-10 features", or the images as they are."""

    def found(name: str) -> Dataset:
        base, _, kind = name.partition(" ")
        if kind == "hog":
            return on_hog(load(base))
        if kind == "features" and backbone is not None:
            return on_backbone(load(base), backbone, cache)
        return load(base if kind == LARGE else name)

    return found
