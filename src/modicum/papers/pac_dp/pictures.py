"""The accuracy matrix as a heat map and the fitted curve with its band."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modicum.figures import blank_figure
from modicum.papers.pac_dp.fit import Fit
from modicum.papers.pac_dp.grid import Matrix, best_bounds


def draw_fit(matrix: Matrix, fit: Fit, path: str | Path) -> None:
    """Both pictures in one file, as PNG."""
    figure = blank_figure(10, 3.9)
    left, right = figure.subplots(1, 2)
    _heat_map(figure, left, matrix)
    _curve(right, matrix, fit)
    figure.savefig(path, dpi=110)


def _heat_map(figure: Any, axes: Any, matrix: Matrix) -> None:
    grid, mean = matrix.grid, matrix.accuracy.mean(2)
    image = axes.imshow(mean.T, origin="lower", aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(grid.budgets)), [f"{v:g}" for v in grid.budgets])
    axes.set_yticks(range(len(grid.bounds)), [f"{v:.3g}" for v in grid.bounds])
    best = best_bounds(grid, matrix.accuracy, matrix.loss)
    axes.plot(range(len(best)), best, "o", color="white", markeredgecolor="black", label="C*")
    axes.set_xlabel("budget ε")
    axes.set_ylabel("bound C")
    axes.set_title("Accuracy on public validation records", loc="left", fontsize=10)
    axes.legend(loc="lower right", frameon=True)
    figure.colorbar(image, ax=axes)


def _curve(axes: Any, matrix: Matrix, fit: Fit) -> None:
    curve = fit.curve
    axes.plot(curve.inputs, curve.bounds, color="#2b6cb0", label=f"{fit.kind}, R² = {fit.r2:.2f}")
    if "band_low" in curve.about:
        low, high = (np.asarray(curve.about[key]) for key in ("band_low", "band_high"))
        label = f"range over {len(matrix.grid.seeds)} seeds"
        axes.fill_between(curve.inputs, low, high, color="#2b6cb0", alpha=0.15, label=label)
    axes.plot(*zip(*fit.pairs, strict=True), "o", color="#c05621", label="C*")
    if fit.outliers:
        axes.plot(*zip(*fit.outliers, strict=True), "x", color="#4a5568", label="outliers")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, values in zip((axes.xaxis, axes.yaxis), zip(*fit.pairs, *fit.outliers, strict=True), strict=True):
        plain_ticks(axis, sorted(set(values)))
    axes.set_xlabel("n/(z√d)" if curve.scale_free else "budget ε")
    axes.set_ylabel("C / public median norm" if curve.scale_free else "bound C")
    axes.set_title("Fitted curve, constant beyond its ends", loc="left", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks at these values, instead of powers of ten."""
    axis.set_ticks(list(values), [f"{v:.3g}" for v in values], minor=False)
    axis.set_ticks([], minor=True)
