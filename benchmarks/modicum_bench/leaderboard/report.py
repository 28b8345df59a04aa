"""The page: accuracy with spread, gain over public records, share of the gap to no privacy, rank, picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modicum_bench.leaderboard.grid import ROWS, Cell

TIED = 2.0  # standard errors of a paired difference


def page(results: Sequence[dict[str, Any]], cells: Sequence[Cell], out: Path) -> str:
    """Markdown, also written to leaderboard.md beside the results, and the picture of gains."""
    found = {cell: _by_method(results, cell) for cell in cells}
    found = {cell: values for cell, values in found.items() if values}
    head = ["cell", "public alone", "no privacy", *ROWS, "gain of auto", "of the gap"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [_row(cell, values) for cell, values in found.items()]
    lines += ["", *_ranks(found)]
    text = "\n".join(lines) + "\n"
    (out / "leaderboard.md").write_text(text, encoding="utf-8")
    picture(found, out / "gain.svg")
    return text


def _by_method(results: Sequence[dict[str, Any]], cell: Cell) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {}
    for r in results:
        if r["cell"] != cell.name:
            continue
        if "accuracy" in r:
            values.setdefault(r["method"], {})[r["seed"]] = 100 * r["accuracy"]
        if r.get("public_only") is not None:
            values.setdefault("public", {})[r["seed"]] = 100 * r["public_only"]
    return values


def _row(cell: Cell, values: dict[str, dict[int, float]]) -> str:
    auto, public, limit = (values.get(k, {}) for k in ("auto", "public", "no privacy"))
    gain = _paired(auto, public)
    gap = "–"
    if auto and public and limit:
        gap = f"{100 * (_mean(auto) - _mean(public)) / (_mean(limit) - _mean(public)):.0f}%"
    shown = [_spread(public), _spread(limit), *(_spread(values.get(name, {})) for name in ROWS)]
    return f"| {cell.name} | {' | '.join(shown)} | {gain} | {gap} |"


def _spread(values: dict[int, float]) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values.values()):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values.values()):.1f}{spread}"


def _paired(one: dict[int, float], other: dict[int, float]) -> str:
    """Mean difference with its 95% interval, over the seeds that both have."""
    both = [one[s] - other[s] for s in one if s in other]
    if len(both) < 2:
        return "–"
    half = _quantile(len(both)) * statistics.stdev(both) / len(both) ** 0.5
    return f"{statistics.fmean(both):+.1f} ± {half:.1f}"


def _quantile(seeds: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.975, seeds - 1))


def _ranks(found: dict[Cell, dict[str, dict[int, float]]]) -> list[str]:
    """Mean rank of every method, and in how many cells it is the best or tied with the best.

    Over cells in which all were played, by the seeds that all have.
    """
    ranks: dict[str, list[int]] = {name: [] for name in ROWS}
    best: dict[str, int] = dict.fromkeys(ROWS, 0)
    for values in found.values():
        seeds = set.intersection(*(set(values.get(name, ())) for name in ROWS))
        if not seeds:
            continue
        shared = {name: {seed: values[name][seed] for seed in seeds} for name in ROWS}
        order = sorted(ROWS, key=lambda name: -_mean(shared[name]))
        for place, name in enumerate(order, start=1):
            ranks[name].append(place)
            best[name] += _ties(shared[name], shared[order[0]])
    lines = ["| method | mean rank | best or tied |", "|---|---|---|"]
    return lines + [
        f"| {name} | {statistics.fmean(r):.1f} | {best[name]} of {len(r)} cells |"
        for name, r in ranks.items()
        if r
    ]


def _ties(one: dict[int, float], best: dict[int, float]) -> bool:
    both = [one[s] - best[s] for s in one if s in best]
    error = statistics.stdev(both) / len(both) ** 0.5 if len(both) > 1 else 0.0
    return statistics.fmean(both) + TIED * error >= 0


def picture(found: dict[Cell, dict[str, dict[int, float]]], path: Path) -> None:
    """Gain of private records over public ones against ε, in hot cells with one budget; one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = sorted({c.task for c in found if c.hot})
    figure, axes = plt.subplots(1, max(1, len(names)), figsize=(4 * max(1, len(names)), 3), squeeze=False)
    for axis, task in zip(axes[0], names, strict=False):
        cells = sorted(
            (c for c in found if c.hot and c.task == task and isinstance(c.budget, float)), key=_smallest
        )
        for name in ROWS:
            gains = [
                (c.smallest, _mean(found[c].get(name, {})) - _mean(found[c]["public"]))
                for c in cells
                if found[c].get(name)
            ]
            if gains:
                axis.plot(*zip(*gains, strict=True), marker="o", label=name, linewidth=2 if name == "auto" else 1)
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.set(title=task, xscale="log", xlabel="ε", ylabel="gain over public records alone", ylim=(-15, 10))
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _smallest(cell: Cell) -> float:
    return cell.smallest


def _mean(values: dict[int, float]) -> float:
    return statistics.fmean(values.values())
