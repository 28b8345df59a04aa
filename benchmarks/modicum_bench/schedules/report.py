"""The table and the picture: points over the best constant, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONSTANT = "best constant"
ROWS = (
    "best schedule",
    "best schedule for each budget",
    "constant, steps by schedule",
    "curve (PAC-DP)",
    "quantile (AQC)",
    "PPO (ACDP-pFSD)",
    "MetaNet (FedMAP)",
    "AUTO-S, no bound",
)
Played = Sequence[dict[str, Any]]


def gains(one: dict[str, Any], row: str) -> list[float]:
    """Points over the best constant, one for each seed; none where the row was not played."""
    found = one["accuracy"].get(row, [])
    return [a - b for a, b in zip(found, one["accuracy"][CONSTANT], strict=False)]


def table(played: Played) -> str:
    """Mean ± standard error of the paired differences."""
    lines = ["| points over the best constant | " + " | ".join(p["task"] for p in played) + " |"]
    lines.append("|---" * (len(played) + 1) + "|")
    lines.append(
        _row("best constant, accuracy", [f"{statistics.fmean(p['accuracy'][CONSTANT]):.1f}" for p in played])
    )
    lines += [_row(row, [_cell(gains(p, row)) for p in played]) for row in ROWS]
    shapes = [" → ".join(f"{k / p['unit']:.2g}" for k in p["schedule"]) for p in played]
    lines.append(_row("its bounds, in public norms", shapes))
    lines.append(_row("the constant", [f"{p['constant'] / p['unit']:.2g}" for p in played]))
    return "\n".join(lines) + "\n"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    spread = statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    text = f"{mean:+.1f} ± {spread:.1f}"
    return f"**{text}**" if abs(mean) > 2 * spread and abs(mean) >= 0.1 else text


def picture(played: Played, path: Path) -> None:
    """A panel a task: each seed a point, the mean a line."""
    from modicum.figures import blank_figure

    columns = min(4, len(played))
    rows = -(-len(played) // columns)
    figure = blank_figure(3.1 * columns + 2, 2.6 * rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axis in axes.flat[len(played) :]:
        axis.set_visible(False)
    for axis, one in zip(axes.flat, played, strict=False):
        for place, row in enumerate(reversed(ROWS)):
            values = gains(one, row)
            if values:
                axis.plot(values, [place] * len(values), "o", color="#2b6cb0", alpha=0.35, markersize=4)
                axis.plot([statistics.fmean(values)], [place], "|", color="#c05621", markersize=14, mew=2)
        axis.axvline(0, color="grey", linewidth=0.7)
        axis.set_title(one["task"], fontsize=9)
        axis.set_yticks(range(len(ROWS)), list(reversed(ROWS)), fontsize=7)
        axis.tick_params(axis="x", labelsize=7)
        axis.grid(axis="x", alpha=0.25)
    figure.supxlabel("points over the best constant, ten new seeds", fontsize=9)
    figure.savefig(path, dpi=110)
