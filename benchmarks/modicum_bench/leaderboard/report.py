"""The page: what private records add, who does it best, and the picture of gains against ε."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from modicum.report.colours import colours_of
from modicum.report.inline import page as html_page
from modicum_bench.leaderboard.figures import Played, gathered, spread
from modicum_bench.leaderboard.grid import ROWS, TASKS, Cell
from modicum_bench.leaderboard.play import AS_CLIENTS, NO_PRIVACY, PUBLIC_ALONE

LEVELS = ("tight", "middle", "loose")
Table = list[list[str]]


def page(results: Sequence[dict[str, Any]], cells: Sequence[Cell], out: Path) -> str:
    """Markdown, also written to leaderboard.md beside the results; the same as HTML; the picture of gains."""
    found = gathered(results, cells)
    parts = [("Ranks", ranks(found)), ("The default method", summary(found))]
    if any(one.wrong for one in found):
        parts.append(("Over seeds and over patients", patients(found)))
    if shifted := gathered(results, cells, AS_CLIENTS):
        parts.append(("With test records weighted as clients' own", summary(shifted)))
    parts.append(("All methods", accuracies(found)))
    text = "\n\n".join(f"{title}:\n\n{markdown(table)}" for title, table in parts) + "\n"
    (out / "leaderboard.md").write_text(text, encoding="utf-8")
    drawn = picture(found, out / "gain.svg")
    body = [f"<h2>{title}</h2>{_html(table)}" for title, table in parts]
    shown = f"<h2>Gain of private records over public ones</h2>{drawn}"
    (out / "leaderboard.html").write_text(html_page("Leaderboard", [shown, *body]), encoding="utf-8")
    return text


def summary(found: Sequence[Played]) -> Table:
    """A line a cell: `auto` beside public records, the best of the others, and no privacy."""
    head = ["cell", "seeds", PUBLIC_ALONE, "auto", "gain", "of the gap", NO_PRIVACY, "best other", "auto minus it"]
    return [head, *(_line(one) for one in found)]


def _line(one: Played) -> list[str]:
    gain, rival, gap = one.minus("auto", PUBLIC_ALONE), one.rival, one.gap("auto")
    beside = one.minus("auto", rival) if rival else None
    return [
        one.cell.title,
        str(len(one.values.get("auto", {}))),
        spread(one.values.get(PUBLIC_ALONE, {})),
        spread(one.values.get("auto", {})),
        gain.text if gain else "–",
        f"{gap:.0%}" if gap is not None else "–",
        spread(one.values.get(NO_PRIVACY, {})),
        f"{rival} {spread(one.values[rival])}" if rival else "–",
        beside.text if beside else "–",
    ]


def patients(found: Sequence[Played]) -> Table:
    """Of cells whose draws judge different patients: `auto` minus the best other and minus public records.

    Three intervals: over draws of these patients, over draws of other patients too, and corrected for draws that
    share records; the last column is the smallest loss that the second excludes.
    """
    head = ["cell", "auto minus", "difference", "over seeds", "over patients too", "corrected", "loss excluded"]
    own = [one for one in found if one.wrong]
    return [head, *(line for one in own for other in (one.rival, PUBLIC_ALONE) if (line := _three(one, other)))]


def _three(one: Played, other: str | None) -> list[str]:
    draws = one.minus("auto", other or "")
    wide, corrected = (d("auto", other or "") for d in (one.over_patients, one.resampled))
    if other is None or draws is None or wide is None or corrected is None:
        return []
    halves = [f"± {d.half:.1f}" for d in (draws, wide, corrected)]
    return [one.cell.title, other, f"{draws.mean:+.1f}", *halves, f"{max(0.0, wide.half - wide.mean):.1f}"]


def accuracies(found: Sequence[Played]) -> Table:
    """Every method's accuracy in every cell."""
    return [["cell", *ROWS], *([one.cell.title, *(spread(one.values.get(n, {})) for n in ROWS)] for one in found)]


def ranks(found: Sequence[Played]) -> Table:
    """Over cells with common draws: mean rank, where a method is best or tied, and where no loss is possible.

    Tied: the 95% interval of its paired difference to the best reaches 0. No loss: the interval excludes a loss of
    more than a point against the best of the others; against public records, the same in hot cells.
    """
    head = ["method", "mean rank", "best or tied", "no loss against the best", "no loss against public alone"]
    return [head, *(_rank(name, [one for one in found if one.whole]) for name in ROWS)]


def _rank(name: str, found: Sequence[Played]) -> list[str]:
    own = [one for one in found if name in one.order]
    if not own:
        return [name, "–", "–", "–", "–"]
    places = [one.order.index(name) + 1 for one in own]
    best = [one.minus(name, one.order[0]) for one in own]
    others = [one.minus(name, next(n for n in one.order if n != name)) for one in own]
    public = [d for one in own if (d := one.minus(name, PUBLIC_ALONE)) is not None]
    return [
        name,
        f"{statistics.fmean(places):.1f}",
        f"{sum(d is not None and d.tied for d in best)} of {len(own)}",
        f"{sum(d is not None and d.sound for d in others)} of {len(own)}",
        f"{sum(d.sound for d in public)} of {len(public)}",
    ]


def markdown(table: Table) -> str:
    """A table as Markdown has it."""
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _html(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    head, *rows = table
    lines = row(head, "th") + "".join(row(r, "td") for r in rows)
    return f"<div style='overflow-x: auto; white-space: nowrap'><table>{lines}</table></div>"


def picture(found: Sequence[Played], path: Path) -> str:
    """Gain of private records over public ones against ε, in hot cells with one budget; one line a method.

    The first part is the mean over tasks, tight, middle and loose; then a part for each task.
    """
    import io

    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    hot = [one for one in found if one.cell.hot and isinstance(one.cell.budget, float)]
    names = [n for n in TASKS if any(one.cell.task == n for one in hot)]
    columns = min(4, len(names) + 1)
    lines = -(-(len(names) + 1) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.7 * lines + 0.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    colours = colours_of(list(ROWS))
    for name in reversed(ROWS):
        style: dict[str, Any] = {"marker": "o", "markersize": 3, "color": colours[name], "label": name}
        style |= {"linewidth": 2.5, "zorder": 3} if name == "auto" else {"linewidth": 1}
        style["linestyle"] = "-" if [*ROWS].index(name) < len(ROWS) / 2 else "--"
        _plot(axes[0], _mean_gains(hot, name), style)
        for axis, task in zip(axes[1:], names, strict=False):
            _plot(axis, _gains([one for one in hot if one.cell.task == task], name), style)
    _named(axes[0], "mean over tasks", LEVELS)
    for axis, task in zip(axes[1:], names, strict=False):
        _named(axis, task, None)
    for axis in axes[len(names) + 1 :]:
        axis.axis("off")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=7, fontsize=7, frameon=False)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    path.write_text(file.getvalue(), encoding="utf-8")
    return file.getvalue()[file.getvalue().index("<svg") :]


def _gains(found: Sequence[Played], name: str) -> list[tuple[float, float]]:
    """(ε, gain) in order; cells of one ε that differ in clients or view are averaged."""
    by: dict[float, list[float]] = {}
    for one in found:
        if (d := one.minus(name, PUBLIC_ALONE)) is not None:
            by.setdefault(one.cell.smallest, []).append(d.mean)
    return [(e, statistics.fmean(by[e])) for e in sorted(by)]


def _mean_gains(hot: Sequence[Played], name: str) -> list[tuple[float, float]]:
    levels: dict[int, list[float]] = {}
    for task in {one.cell.task for one in hot}:
        for e, gain in _gains([one for one in hot if one.cell.task == task], name):
            if e in TASKS[task].budgets:
                levels.setdefault(TASKS[task].budgets.index(e), []).append(gain)
    return [(float(level), statistics.fmean(levels[level])) for level in sorted(levels)]


def _plot(axis: Any, points: list[tuple[float, float]], style: dict[str, Any]) -> None:
    if points:
        axis.plot(*zip(*points, strict=True), **style)


def _named(axis: Any, title: str, ticks: Sequence[str] | None) -> None:
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.set_title(title, fontsize=9)
    axis.set_ylim(-6, max(8.0, axis.get_ylim()[1]))
    axis.tick_params(labelsize=7)
    if ticks is None:
        axis.set_xscale("log")
        axis.set_xticks(TASKS[title].budgets, [f"{b:g}" for b in TASKS[title].budgets], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_xlabel("ε", fontsize=8)
    else:
        axis.set_xticks(range(len(ticks)), ticks)
        axis.set_ylabel("gain in points", fontsize=8)
