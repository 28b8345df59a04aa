"""How well a scale-free curve that was fitted on one task serves another, from the stored matrices alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from modicum.papers.pac_dp.curve import Curve, quietness, read_curve
from modicum.papers.pac_dp.fit import fit_pairs
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.spec import Adjacency, PrivacySpec, ServerSeesMessages, Unit
from modicum_bench.pac_dp.settings import TASKS

SPEC = PrivacySpec(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, view=ServerSeesMessages(), delta=1e-5)


def transfer(out: Path) -> list[str]:
    """Rows: where the curve was fitted; columns: where it is used; public accuracy lost to the best bound."""
    known = {name: found for name in TASKS if (found := _stored(name, out)) is not None}
    lines = ["", "## One scale-free curve for other tasks", ""]
    if len(known) < 2:
        return [*lines, "not run"]
    lines += [
        "Points of public accuracy lost to the best bound of the grid (mean over budgets), with hot start. Bounds "
        "are rounded to the nearest one of the grid.",
        "",
        "| fitted on | " + " | ".join(known) + " |",
        "|---" * (1 + len(known)) + "|",
    ]
    for source, (curve, rounds) in known.items():
        free = _scale_free(curve, rounds)
        lost = [_lost(free, *target) for target in known.values()]
        lines.append(f"| {source} | " + " | ".join(f"{100 * v:.2f}" for v in lost) + " |")
    return lines


def _stored(name: str, out: Path) -> tuple[Curve, int] | None:
    settings = out / f"{name}.json"
    if not settings.is_file():
        return None
    start = json.loads(settings.read_text(encoding="utf-8"))["starts"].get("hot")
    if start is None:
        return None
    curve = read_curve(out / "curves" / start["methods"]["PAC-DP"]["same"]["curve"])
    # A curve without a matrix was not fitted on the task's own public records.
    return (curve, int(start["rounds"])) if "accuracy" in curve.about else None


def _inputs(curve: Curve, rounds: int) -> list[float]:
    about = curve.about
    noises = [calibrate_noise(SPEC, budget, NoSampling(), rounds) for budget in about["grid_budgets"]]
    return [quietness(z, about["dimension"], about["records"]) for z in noises]


def _scale_free(curve: Curve, rounds: int) -> Curve:
    about = curve.about
    best = np.asarray(about["accuracy"]).argmax(1)
    relative = [b / about["scale"] for b in about["grid_bounds"]]
    return fit_pairs(
        _inputs(curve, rounds), [relative[j] for j in best], (relative[0], relative[-1]), scale_free=True
    ).curve


def _lost(free: Curve, curve: Curve, rounds: int) -> float:
    about, accuracy = curve.about, np.asarray(curve.about["accuracy"])
    lost = []
    for i, value in enumerate(_inputs(curve, rounds)):
        bound = about["scale"] * free(value)
        near = min(range(accuracy.shape[1]), key=lambda j: abs(math.log(about["grid_bounds"][j] / bound)))
        lost.append(accuracy[i].max() - accuracy[i, near])
    return float(np.mean(lost))
