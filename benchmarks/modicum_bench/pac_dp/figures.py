"""Figures from the benchmark's files: the fit, the surrogate over measured accuracy, and accuracy by rounds."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modicum.errors import MissingExtraError, UserError
from modicum.federation.experiment import Experiment, Federation, prepare
from modicum.methods import PacDp
from modicum.papers.pac_dp.curve import Curve, read_curve
from modicum.papers.pac_dp.pictures import plain_ticks
from modicum.papers.pac_dp.surrogate import Surrogate, surrogate
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.spec import Adjacency, PrivacySpec, ServerSeesMessages, Unit
from modicum.public.proxy import bootstrap
from modicum.report.colours import PALETTE, colours_of
from modicum_bench.pac_dp.data import Folders, divided, first_model, without_private
from modicum_bench.pac_dp.methods import ADAM
from modicum_bench.pac_dp.report import results
from modicum_bench.pac_dp.settings import CASES, TASKS, Task

Say = Callable[[str], None]
FAR = 5.0  # points: a method that ends further than this below all others is named, and not drawn whole
Curves = dict[str, list[list[float]]]
SPEC = PrivacySpec(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, view=ServerSeesMessages(), delta=1e-5)


def draw_all(out: Path, folders: Folders, to: Path, say: Say) -> list[Path]:
    """Every figure that the files allow; the fit's needs the public records too, and says so."""
    to.mkdir(parents=True, exist_ok=True)
    made = []
    for task in TASKS.values():
        starts = {r["start"] for r in results(task, out)}
        for start, name in (("hot", "rounds"), ("cold", "cold")):
            if start in starts:
                made.append(_rounds_figure(task, out, start, to / f"pac-dp-{task.name}-{name}.png"))
        if task.adam and "cold" in starts:
            made.append(_adam_figure(task, out, to / f"pac-dp-{task.name}-adam.png"))
        for start, name in (("hot", "budgets"), ("cold", "cold-budgets")):
            if any(r["start"] == start and r["row"] == "sweep PAC-DP" for r in results(task, out)):
                made.append(_budgets_figure(task, out, start, to / f"pac-dp-{task.name}-{name}.png"))
        try:
            made += _fit_figures(task, out, folders, to)
        except (UserError, OSError) as error:
            say(f"{task.name}: no picture of the fit: {error}")
    return made


def _fit_figures(task: Task, out: Path, folders: Folders, to: Path) -> list[Path]:
    settings = out / f"{task.name}.json"
    if not settings.is_file():
        return []
    start = json.loads(settings.read_text(encoding="utf-8"))["starts"]["hot"]
    curve = read_curve(out / "curves" / start["methods"]["PAC-DP"]["same"]["curve"])
    return [_fit_figure(task, curve, start, folders, to / f"pac-dp-{task.name}-fit.png")]


def _figure(columns: int, height: float = 3.7) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "a picture") from None
    figure = Figure(figsize=(4.6 * columns, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _fit_figure(task: Task, curve: Curve, start: dict[str, Any], folders: Folders, path: Path) -> Path:
    """Heat map of P, the fitted curve, and J(C; ε) drawn over the measured accuracy."""
    figure, (heat, fitted, theory) = _figure(3)
    about = curve.about
    budgets, bounds = about["grid_budgets"], about["grid_bounds"]
    accuracy = np.asarray(about["accuracy"])
    image = heat.imshow(accuracy.T, origin="lower", aspect="auto")
    heat.set_xticks(range(len(budgets)), [f"{v:g}" for v in budgets])
    heat.set_yticks(range(len(bounds)), [f"{v:g}" for v in bounds])
    for kept, pairs in ((True, about["pairs"]), (False, about["outliers"])):
        at = [(budgets.index(e), bounds.index(c)) for e, c in pairs if e in budgets and c in bounds]
        if at:
            colour = "white" if kept else "none"
            heat.plot(*zip(*at, strict=True), "o", color=colour, markeredgecolor="white" if not kept else "black")
    heat.set(xlabel="ε", ylabel="C", title=f"{task.title}: public accuracy and C*")
    figure.colorbar(image, ax=heat)
    fitted.fill_between(curve.inputs, about["band_low"], about["band_high"], alpha=0.15, label="range over seeds")
    level = len({c for _, c in about["pairs"]}) == 1  # then every class fits alike
    fitted.plot(
        curve.inputs, curve.bounds, label="constant" if level else f"{about['kind']}, R² = {about['r2']:.2f}"
    )
    fitted.plot(*zip(*about["pairs"], strict=True), "o", label="C*")
    if about["outliers"]:
        fitted.plot(*zip(*about["outliers"], strict=True), "o", markerfacecolor="none", label="outlier")
    fitted.set(
        xlabel="ε", ylabel="C", xscale="log", yscale="log", title="F(ε)", ylim=(bounds[0] / 1.3, bounds[-1] * 1.3)
    )
    plain_ticks(fitted.xaxis, budgets)
    plain_ticks(fitted.yaxis, bounds)
    fitted.legend(frameon=False, fontsize=7)
    other = theory.twinx()
    for i, budget in enumerate(budgets[:: max(1, len(budgets) // 2)]):
        row = budgets.index(budget)
        j = public_surrogate(task, start, folders, budget, bounds)
        theory.plot(bounds, j.values, "--", color=PALETTE[i], label=f"ε={budget:g}")
        other.plot(bounds, accuracy[row], "-o", color=PALETTE[i], markersize=3)
    theory.set(xlabel="C", xscale="log", yscale="log", ylabel="J (dashed)", title="Surrogate and accuracy")
    other.set_ylabel("public accuracy (solid)")
    plain_ticks(theory.xaxis, bounds)
    theory.legend(frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    figure.savefig(path, dpi=90)
    return path


def public_surrogate(
    task: Task, start: dict[str, Any], folders: Folders, budget: float, bounds: list[float]
) -> Surrogate:
    """J from public gradients at the first model of a stand-in federation."""
    stand_in = bootstrap(without_private(divided(task, folders)), 0, task.parts)
    experiment = Experiment(
        federation=Federation(stand_in, (budget,) * len(stand_in.clients)),
        method=PacDp(),
        model=first_model(stand_in, start["features"], hot=True),
        rounds=start["rounds"],
    )
    data = prepare(experiment, experiment.method.build(experiment.setting))
    assert isinstance(data.model, torch.nn.Linear)
    size = data.model.weight.numel()
    with torch.no_grad():
        weight, bias = data.first[:size].view_as(data.model.weight), data.first[size:]
        outputs = data.test.x @ weight.T + bias
        error = torch.softmax(outputs, 1) - torch.nn.functional.one_hot(data.test.targets["y"], outputs.shape[1])
        gradients = torch.cat([(error[:, :, None] * data.test.x[:, None, :]).flatten(1), error], 1)
    records = float(np.median(stand_in.sizes))
    z = calibrate_noise(SPEC, budget, NoSampling(), start["rounds"])
    return surrogate(gradients, bounds, z, records, len(stand_in.clients))


def _by_round(task: Task, out: Path, start: str, case: str) -> Curves:
    curves: Curves = defaultdict(list)
    for r in results(task, out):
        whole = r["case"] == case and r["start"] == start and not r["row"].startswith("half")
        if whole and r.get("accuracy") is not None:
            curves[r["row"]].append([100 * r["first"], *(100 * a for a in r["by_round"])])
    return curves


def _title(task: Task, case: str) -> str:
    shown = f"ε = {task.same:g}" if case == "same" else f"ε of {'/'.join(f'{e:g}' for e in task.personal)}"
    return f"{task.title}, {shown}"


def _rounds_figure(task: Task, out: Path, start: str, path: Path) -> Path:
    figure, axes = _figure(2, 4.6)
    for axis, case in zip(axes, CASES, strict=True):
        curves = {row: v for row, v in _by_round(task, out, start, case).items() if not row.endswith(ADAM)}
        means = {row: [statistics.fmean(at) for at in zip(*v, strict=True)] for row, v in sorted(curves.items())}
        colours = colours_of(list(means))
        for row, mean in means.items():
            axis.plot(mean, linewidth=2.2 if row == "PAC-DP" else 1.2, label=row, color=colours[row])
        if start == "cold" and task.target is not None:
            axis.axhline(100 * task.target, color="black", linewidth=0.8, linestyle="--")
        _finish_rounds(axis, _title(task, case) + f", {start} start")
        if start == "hot":
            _zoom(axis, means, by_end=True)
    _legend_below(figure, axes)
    figure.savefig(path, dpi=90)
    return path


def _adam_figure(task: Task, out: Path, path: Path) -> Path:
    """The paper's Fig. 12: clients with Adam, beside the same methods with gradient descent."""
    figure, axes = _figure(2, 4.2)
    for axis, case in zip(axes, CASES, strict=True):
        curves = _by_round(task, out, "cold", case)
        rows = sorted(row for row in curves if row.endswith(ADAM))
        colours = colours_of([row.removesuffix(ADAM) for row in rows])
        for row in rows:
            for name, line in ((row, "-"), (row.removesuffix(ADAM), "--")):
                mean = [statistics.fmean(at) for at in zip(*curves.get(name, []), strict=True)]
                colour = colours[row.removesuffix(ADAM)]
                axis.plot(mean, line, color=colour, label=name if line == "-" else f"{name}, SGD")
        _finish_rounds(axis, _title(task, case) + ", cold start")
    _legend_below(figure, axes)
    figure.savefig(path, dpi=90)
    return path


def _finish_rounds(axis: Any, title: str) -> None:
    axis.set(xlabel="round", ylabel="test accuracy (%)", title=title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)


def _legend_below(figure: Any, axes: Any) -> None:
    named = {n: h for axis in axes for h, n in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named, frameon=False, fontsize=7, ncols=6, loc="outside lower center")


def _zoom(axis: Any, means: Mapping[str, Sequence[float]], *, by_end: bool) -> None:
    """Leave out what ends, or stays, far below all others, so that these can be told apart; say what it was."""
    ends = sorted((mean[-1] if by_end else max(mean), row) for row, mean in means.items())
    far = [k for k in range(1, len(ends)) if ends[k][0] - ends[k - 1][0] > FAR]
    if not far:
        return
    below = ends[: far[-1]]
    values = [v for row, mean in means.items() if row not in {r for _, r in below} for v in mean]
    margin = 0.08 * (max(values) - min(values)) + 0.05
    axis.set_ylim(min(values) - margin, max(values) + margin)
    how = "ends at" if by_end else "at most"
    text = "below the picture: " + ", ".join(f"{row} ({how} {end:.1f})" for end, row in below)
    axis.text(0.02, 0.02, text, transform=axis.transAxes, fontsize=7)


def _budgets_figure(task: Task, out: Path, start: str, path: Path) -> Path:
    """Accuracy by ε: PAC-DP against fixed bounds with its schedule, and against other methods."""
    figure, axes = _figure(2, 4.2)
    for axis, kind in zip(axes, ("search ", "sweep "), strict=True):
        points: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for r in results(task, out):
            ours = r["row"] == "sweep PAC-DP"
            wanted = r["start"] == start and (ours or r["row"].startswith(kind))
            if wanted and r.get("accuracy") is not None:
                points["PAC-DP" if ours else r["row"].removeprefix(kind)][float(r["case"])].append(r["accuracy"])
        means = {row: [100 * statistics.fmean(by[e]) for e in sorted(by)] for row, by in points.items()}
        colours = colours_of(list(means))
        for row, mean in means.items():
            look = {"label": row, "color": colours[row], "linewidth": 2.2 if row == "PAC-DP" else 1.2}
            axis.plot(sorted(points[row]), mean, "-o", markersize=3, **look)
        against = "fixed bounds" if kind == "search " else "other methods"
        title = f"{task.title}, {against}, {start} start"
        axis.set(xlabel="ε of everyone", ylabel="test accuracy (%)", xscale="log", title=title)
        plain_ticks(axis.xaxis, task.fit_budgets)
        axis.yaxis.get_major_formatter().set_useOffset(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))
        _zoom(axis, means, by_end=False)
    figure.savefig(path, dpi=90)
    return path
