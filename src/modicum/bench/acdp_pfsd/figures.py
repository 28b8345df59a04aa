"""The bound and the accuracy over rounds, from the results' files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modicum.bench.acdp_pfsd.report import Result, chosen, gap_ratio, read_results, small
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
    """A figure for each setting that has results."""
    results = read_results(out)
    ratio = gap_ratio(results, "personalised", lambda f: small(results, factor=f))
    best = [] if ratio is None or ratio[1] == 1 else small(results, factor=ratio[1])
    settings = {
        "emnist-sigma1": [r for m in COLOURS for r in chosen(results, task="emnist", method=m, sigma=1.0)],
        "emnist-eps8-head": [r for m in COLOURS for r in small(results, m)] + best,
    }
    return [draw(runs, to / f"acdp-pfsd-{name}.png") for name, runs in settings.items() if runs]


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
        method, factor = run["cell"]["method"], run["cell"].get("factor", 1.0)
        name = method if factor == 1 else f"{method}, C × {factor:g} (best constant)"
        look: dict[str, Any] = {"color": COLOURS[method], "label": name, "lw": 1.4}
        look["ls"] = "-" if factor == 1 else "--"
        rounds = [int(r) for r in run["curve"]]
        personal.plot(rounds, [v[0] for v in run["curve"].values()], **look)
        shared.plot(rounds, [v[1] for v in run["curve"].values()], **look)
        if method != "pfsd":
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
