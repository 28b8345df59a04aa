"""The bound and the accuracy over rounds, from the results' files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modicum.bench.acdp_pfsd.cells import TASKS
from modicum.bench.acdp_pfsd.report import (
    Result,
    best_constant,
    network,
    network_constants,
    read_results,
    small,
    small_constants,
)
from modicum.errors import MissingExtraError

COLOURS = {
    "pfsd": "#4a5568",
    "dp-pfsd": "#2b6cb0",
    "aqc": "#2f855a",
    "bandit": "#b7791f",
    "acdp-pfsd": "#c05621",
    "acdp-pfsd-pretrained": "#b83280",
}


def draw_all(out: Path, to: Path) -> list[Path]:
    """A figure for each setting that has results; the best constant bound is the one for the global model."""
    results = read_results(out)
    settings = {
        "emnist-sigma1": (network, network_constants, TASKS["emnist"].clip),
        "emnist-eps8-head": (small, small_constants, 1.0),
    }
    drawn = []
    for name, (runs_of, constants_of, usual) in settings.items():
        runs, constants = [r for m in COLOURS for r in runs_of(results, m)], constants_of(results)
        best = best_constant(constants, "global")
        if best is not None and best != usual:
            runs += constants[best]
        if runs:
            drawn.append(draw(runs, to / f"acdp-pfsd-{name}.png"))
    return drawn


def draw(runs: Sequence[Result], path: Path) -> Path:
    """Personalised and global accuracy, the bounds, and the norms of what was released (seed 0)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "a picture") from None
    figure = Figure(figsize=(13.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    personal, shared, bounds, norms = figure.subplots(1, 4)
    for run in (r for r in runs if r["cell"]["seed"] == 0):
        method = run["cell"]["method"]
        usual = run["cell"]["clip"] is None and run["cell"]["factor"] == 1
        name = method if usual else f"{method}, best constant C"
        look: dict[str, Any] = {"color": COLOURS[method], "label": name, "lw": 1.4, "ls": "-" if usual else "--"}
        rounds = [int(r) for r in run["curve"]]
        personal.plot(rounds, [v[0] for v in run["curve"].values()], **look)
        shared.plot(rounds, [v[1] for v in run["curve"].values()], **look)
        if method != "pfsd":
            look["alpha"] = 0.3 if method == "bandit" else 1.0  # it leaps too much to be looked through
            every = range(1, len(run["bounds"]) + 1)
            bounds.plot(every, run["bounds"], **look)
            norms.plot(every, run["norms"], **look)
    titles = ("personalised accuracy", "global accuracy", "bound C", "norm of the released mean, noise included")
    for axes, title in zip((personal, shared, bounds, norms), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("round")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    bounds.set_yscale("log")
    norms.set_yscale("log")
    figure.legend(*personal.get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
