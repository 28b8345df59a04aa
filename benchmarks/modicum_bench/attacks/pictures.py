"""What a message gives away, in pictures: a row for each method, and quality behind more and more noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modicum.attacks.order import INVERSIONS
from modicum_bench.attacks.cells import CURVE, EPSILONS, ROWS, path_of


def draw_all(out: Path, tasks: Sequence[str]) -> None:
    """Every figure whose cells are there; none where matplotlib is not."""
    for task in tasks:
        found = _read(out, task)
        points = _points(out, task)
        try:
            if found:
                draw_methods(found).savefig(out / f"attacks-{task}.png", dpi=130)
            if points:
                draw_curve(points).savefig(out / f"attacks-{task}-noise.png", dpi=130)
        except ImportError:
            return


Shown = tuple[dict[str, Any], dict[str, Any]]  # figures, pictures


def _read(out: Path, task: str) -> dict[str, Shown]:
    """Each row's best attack by PSNR, of those that have pictures."""
    found: dict[str, Shown] = {}
    for row in ROWS:
        tried = []
        for attack in row.instead or INVERSIONS:
            path = path_of(out, "reconstruction", task, row.name, attack, 0)
            if path.exists() and path.with_suffix(".npz").exists():
                with np.load(path.with_suffix(".npz")) as kept:
                    tried.append((json.loads(path.read_text(encoding="utf-8")), dict(kept)))
        if tried:
            found[row.name] = max(tried, key=lambda one: float(one[0]["quality"]["psnr"]))
    return found


def _points(out: Path, task: str) -> list[tuple[float, dict[str, Any]]]:
    found = []
    for epsilon, row in sorted(zip(EPSILONS, CURVE, strict=True), key=lambda pair: pair[0]):
        path = path_of(out, "noise", task, row.name, "bayes", 0)
        if path.exists():
            one = json.loads(path.read_text(encoding="utf-8"))
            found += [(epsilon, one)] if one.get("quality") else []
    return found


def draw_methods(found: dict[str, Shown], most: int = 6) -> Any:
    """A row of originals, for each method its best attack by PSNR, and the floor."""
    told, pictures = next(iter(found.values()))
    lines: list[tuple[str, Any]] = [("original", pictures["original"])]
    for name, (best, images) in found.items():
        lines.append((f"{name}\n{best['attack']}, {best['quality']['psnr']:.1f} dB", images["found"]))
    lines.append((f"public mean: the floor\n{told['floor']['psnr']:.1f} dB", pictures["public mean"]))
    most = min(most, len(pictures["original"]))
    figure = _figure(1.0 * most + 2.2, 1.0 * len(lines))
    axes = figure.subplots(len(lines), most, squeeze=False)
    for row, (label, images) in zip(axes, lines, strict=True):
        for cell, image in zip(row, images[:most], strict=True):
            shown = np.clip(np.moveaxis(image, 0, -1), 0, 1)
            cell.imshow(shown[..., 0] if shown.shape[-1] == 1 else shown, cmap="gray", vmin=0, vmax=1)
            cell.set(xticks=[], yticks=[])
            for side in cell.spines.values():
                side.set_visible(False)
        row[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    return figure


def draw_curve(points: Sequence[tuple[float, dict[str, Any]]]) -> Any:
    """PSNR, and hits beside their ceiling, against ε of one message."""
    figure = _figure(9.0, 3.4)
    left, right = figure.subplots(1, 2)
    x = [epsilon for epsilon, _ in points]
    left.plot(x, [o["quality"]["psnr"] for _, o in points], "o-", label="the attack that knows C and z")
    left.axhline(points[0][1]["floor"]["psnr"], color="#4a5568", ls=":", label="public mean (floor)")
    left.set_ylabel("PSNR (dB)")
    hits = [o["quality"] for _, o in points]
    right.errorbar(
        x,
        [q["hits"] for q in hits],
        yerr=[[q["hits"] - q["hits_low"] for q in hits], [q["hits_high"] - q["hits"] for q in hits]],
        fmt="o-",
        capsize=3,
        label="found (MSE < 0.01), 95%",
    )
    right.plot(x, [o["ceiling"] for _, o in points], "k--", label="ceiling")
    right.set_ylabel("share of records")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="ε of the message, δ = 1e-5")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
