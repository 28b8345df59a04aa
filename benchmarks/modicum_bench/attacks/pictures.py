"""What a message gives away, in pictures: a row for each method, and quality behind more and more noise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modicum_bench.attacks.cells import EPSILONS, ROWS


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


def _read(out: Path, task: str) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """(figures, pictures) of each row that has pictures."""
    found = {}
    for row in ROWS:
        path = out / f"reconstruction-{task}-{row.name.replace(', ', '-').replace(' ', '-')}-0.json"
        if path.exists() and path.with_suffix(".npz").exists():
            with np.load(path.with_suffix(".npz")) as kept:
                found[row.name] = json.loads(path.read_text(encoding="utf-8")), dict(kept)
    return found


def _points(out: Path, task: str) -> list[tuple[float, dict[str, Any]]]:
    found = []
    for epsilon in sorted(EPSILONS):
        path = out / f"noise-{task}-ε={epsilon:g}-0.json"
        if path.exists():
            one = json.loads(path.read_text(encoding="utf-8"))[0]
            found += [(epsilon, one)] if one.get("quality") else []
    return found


def draw_methods(found: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]], most: int = 6) -> Any:
    """A row of originals, for each method its best attack by PSNR, and the floor."""
    outcomes, pictures = next(iter(found.values()))
    lines: list[tuple[str, Any]] = [("original", pictures["original"])]
    for name, (told, images) in found.items():
        best = max(told, key=lambda o: o["quality"]["psnr"] if o.get("quality") else -math.inf)
        lines.append((f"{name}\n{best['attack']}, {best['quality']['psnr']:.1f} dB", images[best["attack"]]))
    floor = next(o["floor"]["psnr"] for o in outcomes if o.get("floor"))
    lines.append((f"public mean: the floor\n{floor:.1f} dB", pictures["public mean"]))
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
