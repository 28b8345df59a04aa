"""Accuracy and clipping bound by rounds, as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#4a5568", "#b7791f")


@dataclass(frozen=True)
class Curve:
    """One run in a picture."""

    name: str
    records: Sequence[RoundRecord]
    clipped: bool = True  # False: there is no bound to show


def draw(runs: Sequence[Curve]) -> Any:
    """A matplotlib figure: test accuracy on the left, the bound (median over clients) on the right."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "a picture") from None
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, bound = figure.subplots(1, 2)
    for i, curve in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)]
        _accuracy(accuracy, curve, colour)
        _bound(bound, curve, colour)
    accuracy.set_ylim(0, 1)
    accuracy.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    accuracy.set_title("Test accuracy (simulated ground truth)", loc="left", fontsize=10)
    bound.set_title("Clipping bound C (median and range over clients)", loc="left", fontsize=10)
    if bound.lines:
        bound.set_yscale("log")
        _plain_ticks(bound)
    else:
        bound.text(0.5, 0.5, "nothing is clipped", ha="center", va="center", transform=bound.transAxes)
    for axes in (accuracy, bound):
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    return figure


def png(figure: Any) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def save(figure: Any, path: Path) -> None:
    """Write a figure; the file's ending says in which format."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from None


def _accuracy(axes: Any, curve: Curve, colour: str) -> None:
    seen = [r for r in curve.records if "test_accuracy" in r.simulated]
    rounds, values = [r.round + 1 for r in seen], [r.simulated["test_accuracy"] for r in seen]
    axes.plot(rounds, values, color=colour, label=curve.name, lw=1.8, **_dots(rounds))


def _bound(axes: Any, curve: Curve, colour: str) -> None:
    asked = [r for r in curve.records if r.bounds and all(math.isfinite(b) and b > 0 for b in r.bounds.values())]
    if not asked or not curve.clipped:
        return
    rounds = [r.round + 1 for r in asked]
    axes.plot(rounds, [r.bound for r in asked], color=colour, label=curve.name, lw=1.8, **_dots(rounds))
    low, high = ([f(r.bounds.values()) for r in asked] for f in (min, max))
    axes.fill_between(rounds, low, high, color=colour, alpha=0.12, lw=0)


def _dots(points: Sequence[Any]) -> dict[str, Any]:
    """A curve of few points shows them."""
    return {"marker": "o", "ms": 4} if len(points) <= 12 else {}


def _plain_ticks(axes: Any) -> None:
    """1, 2, 5 rather than 10⁰ and unlabelled minor ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
