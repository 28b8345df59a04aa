"""Accuracy and clipping bound by rounds, as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.errors import UserError
from modicum.figures import blank_figure
from modicum.report import curves
from modicum.report.colours import colours_of
from modicum.report.table import NAMES, SHARES

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord


@dataclass(frozen=True)
class Curve:
    """One run in a picture."""

    name: str
    records: Sequence[RoundRecord]
    clipped: bool = True  # False: there is no bound to show


def draw(runs: Sequence[Curve]) -> Any:
    """A matplotlib figure: the main metric on test data where there is one, and the bound (median of clients)."""
    seen = any(curves.score(curve.records) for curve in runs)
    figure, (*left, right) = _axes(seen)
    colours = colours_of([curve.name for curve in runs])
    for curve in runs:
        for axes in left:
            _accuracy(axes, curve, colours[curve.name])
        _bound(right, curve, colours[curve.name])
    names = [curves.main_metric(curve.records) for curve in runs]
    return _finished(figure, left, right, names)


def draw_bands(runs: Mapping[str, Sequence[Sequence[RoundRecord]]]) -> Any:
    """The same for several seeds of each name: their mean, and a band from the least to the most."""
    seen = any(curves.score(records) for seeds in runs.values() for records in seeds)
    figure, (*left, right) = _axes(seen)
    colours = colours_of(list(runs))
    for name, seeds in runs.items():
        for axes in left:
            _band(axes, name, [curves.score(records) for records in seeds], colours[name])
        _band(right, name, [curves.bound(records) for records in seeds], colours[name])
    names = [curves.main_metric(next(iter(seeds), ())) for seeds in runs.values()]
    return _finished(figure, left, right, names)


def _axes(accuracy: bool) -> tuple[Any, Sequence[Any]]:
    """Two panels, or one where nobody can know an accuracy."""
    figure = blank_figure(9.5 if accuracy else 4.75, 3.8)
    return figure, figure.subplots(1, 2 if accuracy else 1, squeeze=False)[0]


def _finished(figure: Any, left: Sequence[Any], bound: Any, metrics: Sequence[str]) -> Any:
    shown = metrics[0] if len({*metrics}) == 1 else "score"
    for axes in left:
        if shown in SHARES:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_title(f"Test {NAMES.get(shown, shown)} (simulated ground truth)", loc="left", fontsize=10)
    bound.set_title("Clipping bound C (median and range over clients)", loc="left", fontsize=10)
    if bound.lines:
        bound.set_yscale("log")
        _plain_ticks(bound)
    else:
        bound.text(0.5, 0.5, "nothing is clipped", ha="center", va="center", transform=bound.transAxes)
    for axes in (*left, bound):
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if len(metrics) > 1:
        named = left[0] if left else bound
        figure.legend(*named.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
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
    seen = curves.score(curve.records)
    axes.plot(list(seen), list(seen.values()), color=colour, label=curve.name, lw=1.8, **_dots(list(seen)))


def _bound(axes: Any, curve: Curve, colour: str) -> None:
    asked = [r for r in curve.records if curves.clipped(r)]
    if not asked or not curve.clipped:
        return
    rounds = [r.round + 1 for r in asked]
    axes.plot(rounds, [r.bound for r in asked], color=colour, label=curve.name, lw=1.8, **_dots(rounds))
    low, high = ([f(r.bounds.values()) for r in asked] for f in (min, max))
    axes.fill_between(rounds, low, high, color=colour, alpha=0.12, lw=0)


def _band(axes: Any, name: str, seeds: Sequence[Mapping[int, float]], colour: str) -> None:
    found = curves.band([dict(one) for one in seeds])
    if not found:
        return
    rounds, mean, low, high = ([line[i] for line in found] for i in range(4))
    axes.plot(rounds, mean, color=colour, label=name, lw=1.8, **_dots(rounds))
    axes.fill_between(rounds, low, high, color=colour, alpha=0.15, lw=0)


def _dots(points: Sequence[Any]) -> dict[str, Any]:
    """A curve of few points shows them."""
    return {"marker": "o", "ms": 4} if len(points) <= 12 else {}


def _plain_ticks(axes: Any) -> None:
    """1, 2, 5 rather than 10⁰ and unlabelled minor ticks."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
