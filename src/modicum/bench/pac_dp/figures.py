"""Figures from the benchmark's files: the fit, the surrogate over measured accuracy, and accuracy by rounds."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modicum.bench.pac_dp.data import Folders, divided, first_model, without_private
from modicum.bench.pac_dp.report import results
from modicum.bench.pac_dp.settings import TASKS, Task
from modicum.errors import MissingExtraError, UserError
from modicum.federation.experiment import Experiment, Federation, prepare
from modicum.fitting.proxy import bootstrap
from modicum.methods import PacDp
from modicum.policies.curve import Curve, read_curve
from modicum.privacy.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.spec import Adjacency, PrivacySpec, ServerSeesMessages, Unit
from modicum.theory import Surrogate, surrogate

Say = Callable[[str], None]
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#4a5568", "#b7791f", "#0987a0")
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
        if starts:
            made.append(_budgets_figure(task, out, to / f"pac-dp-{task.name}-budgets.png"))
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


def _figure(columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "a picture") from None
    figure = Figure(figsize=(4.6 * columns, 3.7), layout="constrained")
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
    heat.plot(range(len(budgets)), accuracy.argmax(1), "o", color="white", markeredgecolor="black")
    heat.set(xlabel="ε", ylabel="C", title=f"{task.title}: public accuracy, C* marked")
    figure.colorbar(image, ax=heat)
    fitted.fill_between(curve.inputs, about["band_low"], about["band_high"], alpha=0.15, label="range over seeds")
    fitted.plot(curve.inputs, curve.bounds, label=f"{about['kind']}, R² = {about['r2']:.2f}")
    fitted.plot(*zip(*about["pairs"], strict=True), "o", label="C*")
    fitted.set(xlabel="ε", ylabel="C", xscale="log", yscale="log", title="F(ε)")
    fitted.legend(frameon=False)
    other = theory.twinx()
    for i, budget in enumerate(budgets[:: max(1, len(budgets) // 2)]):
        row = budgets.index(budget)
        j = public_surrogate(task, start, folders, budget, bounds)
        theory.plot(bounds, j.values, "--", color=COLOURS[i], label=f"J, ε={budget:g}")
        other.plot(bounds, accuracy[row], "-o", color=COLOURS[i], markersize=3)
    theory.set(xlabel="C", xscale="log", yscale="log", ylabel="J (dashed)", title="Surrogate and accuracy")
    other.set_ylabel("public accuracy (solid)")
    theory.legend(frameon=False, fontsize=7)
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


def _rounds_figure(task: Task, out: Path, start: str, path: Path) -> Path:
    figure, axes = _figure(2)
    for axis, case in zip(axes, ("same", "personal"), strict=True):
        curves: dict[str, list[list[float]]] = defaultdict(list)
        for r in results(task, out):
            whole = r["case"] == case and r["start"] == start and not r["row"].startswith("half")
            if whole and r.get("accuracy") is not None:
                curves[r["row"]].append([r["first"], *r["by_round"]])
        for i, (row, values) in enumerate(sorted(curves.items())):
            mean = [100 * statistics.fmean(v[t] for v in values) for t in range(len(values[0]))]
            axis.plot(mean, label=row, color=COLOURS[i % len(COLOURS)], linestyle="-" if i < len(COLOURS) else ":")
        if start == "cold" and task.target is not None:
            axis.axhline(100 * task.target, color="black", linewidth=0.8, linestyle="--")
        axis.set(xlabel="round", ylabel="test accuracy (%)", title=f"{task.title}, {start} start, {case}")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=6)
    figure.savefig(path, dpi=90)
    return path


def _budgets_figure(task: Task, out: Path, path: Path) -> Path:
    """Accuracy by ε: PAC-DP against fixed bounds with its schedule, and against other methods."""
    figure, axes = _figure(2)
    for axis, kind in zip(axes, ("search ", "sweep "), strict=True):
        points: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for r in results(task, out):
            ours = r["row"] == "sweep PAC-DP"
            if (ours or r["row"].startswith(kind)) and r.get("accuracy") is not None:
                points["PAC-DP" if ours else r["row"].removeprefix(kind)][float(r["case"])].append(r["accuracy"])
        for i, (row, by_budget) in enumerate(points.items()):
            means = [100 * statistics.fmean(by_budget[e]) for e in sorted(by_budget)]
            width = 2.2 if row == "PAC-DP" else 1.0
            axis.plot(sorted(by_budget), means, "-o", markersize=3, label=row, color=COLOURS[i], linewidth=width)
        axis.set(xlabel="ε of everyone", ylabel="test accuracy (%)", xscale="log", title=task.title)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=6)
    figure.savefig(path, dpi=90)
    return path
