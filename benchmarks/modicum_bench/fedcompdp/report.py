"""The tables of `modicum bench fedcompdp` as Markdown."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from modicum_bench.fedcompdp.play import PRINTED
from modicum_bench.fedcompdp.rows import (
    ALONE,
    AS_PRINTED,
    AUTO,
    EARLIER,
    GATE,
    LONG,
    MESSAGES,
    OURS,
    PUBLIC,
    SUM,
    TABLE_I,
    TABLE_II,
)

NO_ADPC = "without ADPC, with what in its place the paper does not say"
PUBLISHED = {  # accuracy, macro-F1 at a claimed ε of 8
    "cifar-10": {
        "FedCompDP": (0.8108, 0.8090),
        "DP-FedSAM": (0.7424, 0.7416),
        "DP-ACDN": (0.7073, 0.7080),
        "FedACG": (0.6838, 0.6819),
        "AWDP-FL": (0.5635, 0.5582),
        "FedSA": (0.5222, 0.4931),
        "without CRA (DA)": (0.7222, 0.6000),
        "without ADPC: fixed bound": (0.4624, 0.4472),  # its "w/o FDPC", which it calls fixed clipping
        NO_ADPC: (0.7938, 0.7910),
        "without LLCM's threshold (LC)": (0.7358, 0.7361),
    },
    "svhn": {
        "FedCompDP": (0.8974, 0.8903),
        "DP-FedSAM": (0.7863, 0.8602),
        "DP-ACDN": (0.7769, 0.8326),
        "FedACG": (0.8798, 0.8739),
        "AWDP-FL": (0.7975, 0.7694),
        "FedSA": (0.7693, 0.7621),
        "without CRA (DA)": (0.8630, 0.8480),
        "without ADPC: fixed bound": (0.7322, 0.7278),
        NO_ADPC: (0.8775, 0.8671),
        "without LLCM's threshold (LC)": (0.8167, 0.8019),
    },
}
WITHOUT_CRA = "without CRA (DA)"
SCRATCH, JOINED = "nothing public", "-histograms"


def tables(out: Path) -> str:
    """Gate, Table I, Table II and the faithful row of every task that was played."""
    path = out / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    tasks = sorted({r["task"] for r in rows})
    parts = [_task(name, [r for r in rows if r["task"] == name]) for name in tasks]
    return "\n\n".join([*parts, *_worth(rows, [t for t in tasks if SCRATCH not in t and JOINED not in t])]) + "\n"


def _worth(rows: list[dict[str, Any]], tasks: list[str]) -> list[str]:
    """Points by which FedCompDP is better than without a part: paired by seed, with the spread of that."""
    if not any(r["row"] in TABLE_II for r in rows):
        return []
    lines = ["### What each part is worth, in points of accuracy (and of how many seeds)", ""]
    lines += [f"| FedCompDP less itself … | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    for view, said in ((MESSAGES, ""), (SUM, ", in a sum")):
        for part in (part for part in TABLE_II if view == MESSAGES or part not in ALONE):
            cells = " | ".join(_difference(rows, task, view, part) for task in tasks)
            lines.append(f"| {part}{said} | {cells} |")
    return ["\n".join(lines)]


def _difference(rows: list[dict[str, Any]], task: str, view: str, part: str) -> str:
    found = {(r["row"], r["seed"]): r["accuracy"] for r in rows if (r["task"], r["view"]) == (task, view)}
    both = [100 * (found[OURS, s] - found[n, s]) for n, s in found if n == part and (OURS, s) in found]
    if not both:
        return "not run"
    spread = f" ± {statistics.stdev(both):.2f}" if len(both) > 1 else ""
    return f"{statistics.fmean(both):+.2f}{spread} ({len(both)})"


def _task(name: str, rows: list[dict[str, Any]]) -> str:
    published = PUBLISHED.get(name.split()[0].removesuffix(JOINED), {})
    seeds = len({r["seed"] for r in rows})
    lines = [
        f"### {name}, {seeds} seed{'s' if seeds > 1 else ''}",
        "",
        "| row | accuracy / macro-F1, true ε = 8, server sees messages | behind secure aggregation | printed |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row} | {_cell(rows, row, MESSAGES)} | – | – |" for row in (GATE, PUBLIC)]
    if name.endswith(SCRATCH):
        return "\n".join([*lines[:4], *(_both(rows, row) for row in (GATE, AUTO, LONG))])
    parts = (WITHOUT_CRA,) if JOINED in name else tuple(TABLE_II)
    shown = [(f"**{row}**", row) for row in (*TABLE_I, AUTO)] + [(f"{OURS}, {row}", row) for row in parts]
    lines += [
        f"| {title} | {_cell(rows, row, MESSAGES)} | {_behind(rows, row)} | {_printed(published, row)} |"
        for title, row in shown
    ]
    lines += (
        [f"| {OURS}, {NO_ADPC} | – | – | {_printed(published, NO_ADPC)} |"]
        if published and JOINED not in name
        else []
    )
    for row in (r for r in rows if r["row"] in (AS_PRINTED, EARLIER)):
        figures = f"{row['accuracy']:.4f} / {row['macro_f1']:.4f} at a true ε of {row['epsilon']:.0f}"
        lines.append(f"| {row['row']} ({PRINTED} rounds, seed 0) | {figures} | – | – |")
    return "\n".join(lines)


def _both(rows: list[dict[str, Any]], row: str) -> str:
    return f"| {row} | {_cell(rows, row, MESSAGES)} | {'–' if row == GATE else _cell(rows, row, SUM)} | – |"


def _behind(rows: list[dict[str, Any]], row: str) -> str:
    """What a sum has of the row: FedCompDP without CRA is what it can be there."""
    if row == OURS:
        return "refused: CRA needs messages"
    if row == WITHOUT_CRA:
        return _cell(rows, OURS, SUM)
    return "refused" if row in ALONE else _cell(rows, row, SUM)


def _printed(published: dict[str, tuple[float, float]], row: str) -> str:
    return "{:.4f} / {:.4f}".format(*published[row]) if row in published else "–"


def _cell(rows: list[dict[str, Any]], name: str, view: str) -> str:
    own = [r for r in rows if r["row"] == name and r["view"] == view]
    if not own:
        return "not run"
    shown = " / ".join(_spread([r[key] for r in own]) for key in ("accuracy", "macro_f1"))
    missing = len({r["seed"] for r in rows}) - len(own)
    return f"{shown} ({len(own)} of {len(own) + missing} seeds)" if missing else shown


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def picture(out: Path) -> None:
    """What is gained or lost without each part, seed by seed."""
    path = out / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    tasks = sorted({r["task"] for r in rows if r["row"] in TABLE_II and r["view"] == MESSAGES})
    if not tasks:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(tasks), figsize=(2 + 3.2 * len(tasks), 2.6), sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        found = {
            (r["row"], r["seed"]): 100 * r["accuracy"] for r in rows if (r["task"], r["view"]) == (task, MESSAGES)
        }
        for place, row in enumerate(TABLE_II):
            gains = [found[row, s] - found[OURS, s] for n, s in found if n == row and (OURS, s) in found]
            axis.plot(gains, [place] * len(gains), "o", color="tab:blue", alpha=0.6)
        axis.axvline(0, color="grey", linewidth=0.5)
        axis.set(title=task, yticks=range(len(TABLE_II)), xlabel="points over FedCompDP whole")
        axis.set_yticklabels(list(TABLE_II), fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "ablations.svg")
    plt.close(figure)
