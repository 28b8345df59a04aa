"""A picture of who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.data.arrays import FederatedData
from modicum.errors import UserError
from modicum.figures import blank_figure


def label_counts(data: FederatedData) -> npt.NDArray[np.int64]:
    """Training records of each client (rows) in each class (columns)."""
    return np.stack([np.bincount(c.train.y, minlength=data.classes) for c in data.clients]).astype(np.int64)


def draw_partition(
    data: FederatedData, path: str | Path, *, title: str = "", budgets: Sequence[float] | None = None
) -> None:
    """Clients × classes as bubbles whose area is the number of records, with each client's size beside it."""
    counts = label_counts(data)
    n, classes = counts.shape
    # Many clients or classes share a fixed space rather than growing the picture without limit.
    figure = blank_figure(min(4.5 + 0.32 * classes, 16), min(2 + 0.27 * n, 20))
    bubbles, bars = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    _bubbles(bubbles, counts, figure.get_size_inches())
    _bars(bars, counts.sum(axis=1), budgets)
    labels = (
        data.names
        if budgets is None
        else [f"{name}  ε={e:g}" for name, e in zip(data.names, budgets, strict=True)]
    )
    every = max(1, -(-n // 60))
    bubbles.set_yticks(range(0, n, every), labels[::every])
    bubbles.set_ylim(n - 0.4, -0.6)
    figure.suptitle(title or data.dataset)
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from None


def _bubbles(axes: Any, counts: npt.NDArray[np.int64], inches: npt.NDArray[np.float64]) -> None:
    n, classes = counts.shape
    client, label = np.nonzero(counts)
    # The largest bubble just fills its cell (areas are in square points, 72 to the inch).
    cell = 72 * min(inches[0] * 0.55 / classes, (inches[1] - 1) / n)
    area = counts[client, label] / counts.max() * (0.95 * cell) ** 2
    axes.scatter(label, client, s=area, color="#2b6cb0", linewidths=0)
    axes.set_xlim(-0.6, classes - 0.4)
    axes.set_xticks(range(0, classes, max(1, -(-classes // 20))))
    axes.set_xlabel(f"class (largest bubble: {counts.max():,} records)")
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)


def _bars(axes: Any, sizes: npt.NDArray[np.int64], budgets: Sequence[float] | None) -> None:
    axes.barh(range(len(sizes)), sizes, color=_colours(len(sizes), budgets))
    axes.set_xlabel("training records")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _colours(clients: int, budgets: Sequence[float] | None) -> list[Any]:
    """Clients of one budget share a shade, darker for a larger ε."""
    if budgets is None:
        return ["#718096"] * clients
    levels = sorted(set(budgets))
    shade = {e: 0.75 - 0.55 * i / max(1, len(levels) - 1) for i, e in enumerate(levels)}
    return [str(shade[e]) for e in budgets]
