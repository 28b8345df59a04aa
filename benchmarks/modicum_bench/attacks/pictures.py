"""What a message gives away, in pictures: one method a row, and the same attack behind more and more noise.

    python -m modicum_bench.attacks.pictures --task mnist --device cuda --out DIR [--targets 32] [--seconds 180]

records (what is there is kept) and draws where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modicum.data.arrays import Dataset
from modicum.methods import DpSgd
from modicum_bench.attacks.cells import ROWS, Row, Size, dataset, reconstruct

SHOWN = (
    "fedavg",
    "soteria",
    "soteria, adaptive",
    "censor",
    "dp-sgd",
    "acdp-pfsd, messages",
    "acdp-pfsd, each share",
)
EPSILONS = (1e6, 1e5, 1e4, 1e3, 300.0, 100.0, 30.0, 8.0, 1.0)


@dataclass(frozen=True)
class Recorded:
    """One row: figures of each attack, and its first pictures."""

    name: str
    outcomes: list[dict[str, Any]]
    pictures: dict[str, Any]


def rows() -> list[tuple[str, Row, tuple[str, ...]]]:
    """(name, row, attacks): methods first, then one curve over ε with the attack that knows the noise."""
    known = {row.name: row for row in ROWS}
    found: list[tuple[str, Row, tuple[str, ...]]] = [(name, known[name], ("ig", "bayes")) for name in SHOWN]
    for epsilon in EPSILONS:
        made = Row(f"ε = {epsilon:g}", lambda batch, steps: DpSgd(batch=None, steps=steps, lr=0.1), epsilon)  # noqa: ARG005
        found.append((f"curve-{epsilon:g}", made, ("bayes",)))
    return found


def record(data: Dataset, out: Path, size: Size, device: str, seconds: float) -> None:
    """Fill what is missing until `seconds` have passed. Methods train LeNet-5, the curve a network that hides
    nothing of one record: its first layer is linear."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for name, row, attacks in rows():
        path = out / f"{name.replace(', ', '-').replace(' ', '-')}.npz"
        if path.exists() or time.monotonic() - began > seconds:
            continue
        with tempfile.TemporaryDirectory() as passing:
            model = "mlp" if name.startswith("curve") else "lenet"
            report = reconstruct(row, data, model, size, attacks, Path(passing), device, 0)
        told = json.dumps({"name": name, "outcomes": [o.to_dict() for o in report.outcomes]}, default=str)
        images = {}
        if report.picture is not None:
            images = {"original": report.picture.original.numpy(), "public mean": report.picture.floor.numpy()}
            images |= {attack: found.numpy() for attack, found in report.picture.found.items()}
        np.savez_compressed(path, told=np.array(told), **images)  # type: ignore[arg-type]
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def read(out: Path) -> dict[str, Recorded]:
    """What was recorded, by name."""
    found = {}
    for path in sorted(out.glob("*.npz")):
        with np.load(path) as kept:
            told = json.loads(str(kept["told"]))
            pictures = {name: kept[name] for name in kept.files if name != "told"}
        found[told["name"]] = Recorded(told["name"], told["outcomes"], pictures)
    return found


def draw_methods(found: dict[str, Recorded], most: int = 6) -> Any:
    """A row of originals, for each method its better attack by PSNR, and the floor."""
    lines: list[tuple[str, Any]] = []
    first = next(found[name] for name in SHOWN if name in found)
    lines.append(("original", first.pictures["original"]))
    for name in (n for n in SHOWN if n in found):
        best = max(found[name].outcomes, key=lambda o: o["quality"]["psnr"] if o["quality"] else -math.inf)
        psnr = best["quality"]["psnr"]
        lines.append((f"{name}\n{best['attack']}, {psnr:.1f} dB", found[name].pictures[best["attack"]]))
    floor = first.outcomes[0]["floor"]["psnr"]
    lines.append((f"public mean: the floor\n{floor:.1f} dB", first.pictures["public mean"]))
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


def draw_curve(found: dict[str, Recorded]) -> Any:
    """PSNR, and hits beside their ceiling, against ε of one message."""
    kept = {epsilon: found.get(f"curve-{epsilon:g}") for epsilon in sorted(EPSILONS)}
    points = [(epsilon, one.outcomes[0]) for epsilon, one in kept.items() if one and one.outcomes[0]["quality"]]
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, then draw what can be drawn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--targets", type=int, default=6)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--seconds", type=float, default=1e6)
    given = parser.parse_args(arguments)
    size = Size(targets=given.targets, batch=1, clients=1, records=1, rounds=1, effort=given.preset)
    record(dataset(given.task, given.data_dir), given.out, size, given.device, given.seconds)
    found = read(given.out)
    try:
        draw_methods(found).savefig(given.out / f"attacks-{given.task}.png", dpi=130)
        draw_curve(found).savefig(given.out / f"attacks-{given.task}-noise.png", dpi=130)
    except ImportError:
        print("matplotlib is not installed: no figures")


if __name__ == "__main__":
    main()
