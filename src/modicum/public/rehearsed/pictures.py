"""The accuracy matrix as a heat map and the fitted curve with its band; a network's decisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modicum.errors import MissingExtraError
from modicum.public.rehearsed.curves import Fit
from modicum.public.rehearsed.grid import Matrix, best_bounds


def draw_fit(matrix: Matrix, fit: Fit, path: str | Path) -> None:
    """Both pictures in one file, as PNG."""
    figure, left, right = _two_pictures()
    _heat_map(figure, left, matrix)
    _curve(right, matrix, fit)
    figure.savefig(path, dpi=110)


def _two_pictures() -> tuple[Any, Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", None, "a picture") from None
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, *figure.subplots(1, 2)


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


def draw_decisions(decisions: Sequence[tuple[float, str]], losses: Sequence[float], path: str | Path) -> None:
    """What a fitted network decides, round by round, on a held-out stand-in, beside its training loss."""
    figure, left, right = _two_pictures()
    left.step(range(len(decisions)), [bound for bound, _ in decisions], where="mid")
    left.set(xlabel="round", ylabel="clipping bound C", yscale="log", title="decisions")
    names = sorted({kind for _, kind in decisions})
    kinds = left.twinx()
    kinds.plot([names.index(kind) for _, kind in decisions], ".", color="C1")
    kinds.set_yticks(range(len(names)), names)
    kinds.set_ylabel("kinds of noise in use", color="C1")
    right.plot([-loss for loss in losses])
    right.set(xlabel="epoch", ylabel="weighted progress U", title="training")
    figure.savefig(path, dpi=110)
