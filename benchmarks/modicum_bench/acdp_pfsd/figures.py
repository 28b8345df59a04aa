"""The bound and the accuracy over rounds, from the results' files."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modicum.errors import MissingExtraError
from modicum.report.colours import colours_of
from modicum_bench.acdp_pfsd.cells import FIG_4, LONGER, OTHERS, SMALL_NETWORK, TASKS
from modicum_bench.acdp_pfsd.report import (
    MODELS,
    Result,
    best_constant,
    chosen,
    network,
    network_constants,
    read_results,
    small,
    small_constants,
)

COLOURS = colours_of(["pfsd", "dp-pfsd", "aqc", "bandit", "acdp-pfsd", "acdp-pfsd-pretrained"])


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
    for task in OTHERS:
        wanted = {"task": task, "model": SMALL_NETWORK, "variant": LONGER, "sigma": 1.0}
        runs = [r for m in COLOURS for r in chosen(results, method=m, **wanted)]
        if runs:
            drawn.append(draw(runs, to / f"acdp-pfsd-{task}-sigma1.png"))
    for name, model in MODELS.items():
        if any(network(results, m, clients=100, shards="s1", model=model) for m in FIG_4):
            drawn.append(draw_shards(results, name, to / f"acdp-pfsd-shards-{model or 'network'}.png"))
    return drawn


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "a picture") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_shards(results: Sequence[Result], name: str, path: Path) -> Path:
    """The paper's Fig. 4: how much the division of classes among clients matters to each method."""
    figure = _figure(9.0, 3.4)
    runs = {
        (m, s): network(results, m, clients=100, shards=s, model=MODELS[name]) for m in FIG_4 for s in ("s1", "s2")
    }
    methods = [m for m in FIG_4 if any(runs[m, s] for s in ("s1", "s2"))]
    shown = {"personalised": "personalised", "global_own": "global, own records"}
    for axes, (key, title) in zip(figure.subplots(1, 2), shown.items(), strict=True):
        for k, shards in enumerate(("s1", "s2")):
            found = {i: runs[m, shards] for i, m in enumerate(methods) if runs[m, shards]}
            means = [100 * statistics.fmean(r[key] for r in rows) for rows in found.values()]
            axes.bar([i + 0.38 * k for i in found], means, 0.36, label=shards, color=("#2b6cb0", "#c05621")[k])
        axes.set_xticks([i + 0.19 for i in range(len(methods))], methods, rotation=20, fontsize=8)
        axes.set_title(f"{title} accuracy (%), {name}", loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return _saved(figure, path)


def draw(runs: Sequence[Result], path: Path) -> Path:
    """Personalised and global accuracy, the bounds, and the norms of what was released (seed 0)."""
    figure = _figure(13.5, 3.6)
    personal, shared, bounds, norms = figure.subplots(1, 4)
    for run in (r for r in runs if r["cell"]["seed"] == 0):
        method = run["cell"]["method"]
        usual = run["cell"]["clip"] is None and run["cell"]["factor"] == 1
        name = method if usual else f"{method}, best constant C"
        look: dict[str, Any] = {"color": COLOURS[method], "label": name, "lw": 1.4, "ls": _line(method, usual)}
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
    for axes in (bounds, norms):
        axes.set_yscale("log", subs=[])
        axes.yaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(*personal.get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    return _saved(figure, path)


def _line(method: str, usual: bool) -> str:
    """Constant bounds are broken lines: their accuracies lie upon others."""
    return (":" if method == "dp-pfsd" else "-") if usual else "--"


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
