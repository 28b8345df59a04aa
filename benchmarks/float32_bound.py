"""The bound of a clipped sum in floating point on this device: a search for what moves a sum, and what it costs.

PYTHONPATH=src:. python benchmarks/float32_bound.py --device cuda --out FILE

Needs torch and numpy. Every route is attacked, with and without tf32, beside the same in plain float32; then the
layers of a ResNet-18 are timed, norms and weighted sums, beside the arithmetic that is not bounded.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tests.compute.attacks import CAUGHT, MODELS, MUTANTS, ROUTES, THRESHOLDS, Attack, climb, hostile_movement
from tests.compute.helpers import cross_entropy
from torch import Tensor

from modicum.compute import Flat, Way, clipped_sum
from modicum.compute.clipping.convolution import ConvWeight, Geometry
from modicum.models import build

LAYERS = [(64, 64, 32, 1, 3), (64, 128, 32, 2, 3), (128, 128, 16, 1, 3), (128, 256, 16, 2, 3), (256, 256, 8, 1, 3),
          (256, 512, 8, 2, 3), (512, 512, 4, 1, 3)]  # fmt: skip
"""Channels in and out, size, stride, kernel."""


def some_attack(draw: random.Random) -> Attack:
    return Attack(
        draw.choice(THRESHOLDS),
        draw.choice([1, 2, 5, 16, 80]),
        draw.choice([2, 8, 16, 32, 64]),
        draw.randrange(1 << 20),
        tuple(draw.sample(range(80), draw.choice([2, 4, 6]))),
        draw.uniform(0, 8),
        draw.uniform(-6, 2),
        draw.uniform(-3, 3),
        draw.random() < 0.5,
        draw.randrange(1 << 20),
        draw.random() < 0.3,
    )


def attacked(device: str, seconds: float) -> dict[str, float]:
    """The largest movement that was found for each route, in units of the bound; `seconds` for all together."""
    draw, worst = random.Random(0), {}
    routes = {**{f"plain {name}": route for name, route in MUTANTS.items()}, **ROUTES}
    first = [attack for known in CAUGHT.values() for attack in known]
    first += [replace(attack, wide=64) for attack in first]  # as wide as a GPU's own kernel for sums
    until = time.perf_counter() + seconds
    while first or time.perf_counter() < until:
        attack = first.pop() if first else some_attack(draw)
        for name, route in routes.items():
            worst[name] = max(worst.get(name, 0.0), climb(attack, route, draw.choice([0, 0, 0, 2]), device))
        name = draw.choice(list(MODELS))
        sizes = [draw.uniform(-4, 9) for _ in range(8)]
        moved = hostile_movement(name, draw.choice([33, 64, 92, 130]), sizes, draw.random() < 0.5, 0, device)
        worst[f"model: {name}"] = max(worst.get(f"model: {name}", 0.0), moved)
    return worst


def timed(work: Callable[[], object], device: str, repeats: int = 15) -> float:
    """Milliseconds, the median."""
    times = []
    for _ in range(repeats + 3):
        before = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times[3:])


def unbounded_sum(piece: ConvWeight, weights: Tensor) -> Tensor:
    """One product of the whole batch, in whatever precision the device likes."""
    geo, weighted = piece.geometry, piece.g * weights[:, None, None, None]
    found: Tensor = torch.ops.aten.convolution_backward(
        weighted, piece.a, piece.g.new_empty(piece.shape), None,
        geo.stride, geo.padding, geo.dilation, False, (0, 0), geo.groups, (False, True, False),
    )[1]  # fmt: skip
    return found


def layer_times(device: str, batch: int) -> list[dict[str, object]]:
    rows = []
    for channels, outs, size, stride, kernel in LAYERS:
        a = torch.randn(batch, channels, size, size, device=device)
        g = torch.randn(batch, outs, size // stride, size // stride, device=device)
        geometry = Geometry((kernel, kernel), (stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
        piece = ConvWeight(a, g, geometry, torch.Size((outs, channels, kernel, kernel)))
        weights = torch.rand(batch, device=device)
        _, kept = piece.measure()
        row: dict[str, object] = {
            "layer": f"{channels}→{outs}, {size}×{size}/{stride}",
            "kept": type(kept).__name__,
        }
        row["measure ms"] = timed(piece.measure, device)
        row["sum ms"] = timed(lambda kept=kept, weights=weights: kept.weighted_sum(weights), device)
        row["unbounded sum ms"] = timed(lambda piece=piece, weights=weights: unbounded_sum(piece, weights), device)
        rows.append(row)
        print(row, flush=True)
    return rows


def step_times(device: str) -> dict[str, float]:
    """Whole clipped sums, launch by launch."""
    found = {}
    for name, shape, batch in (
        ("cnn-small", (1, 28, 28), 128),
        ("resnet18", (3, 32, 32), 512 if device == "cuda" else 16),
    ):
        model = build(name, shape, 10, seed=0).to(device)
        x, y = torch.rand(batch, *shape, device=device), torch.randint(10, (batch,), device=device)
        run = lambda: clipped_sum(model, cross_entropy, x, y, Flat(1.0), way=Way.EAGER)  # noqa: B023, E731
        found[f"{name}, B={batch}"] = timed(run, device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run()
            found[f"{name}, B={batch}, GiB"] = torch.cuda.max_memory_allocated() / 2**30
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60, help="of searching, for each precision")
    chosen = parser.parse_args()
    found: dict[str, object] = {"torch": torch.__version__, "device": chosen.device}
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision == "high"
        worst = attacked(chosen.device, chosen.seconds)
        found[f"movement, {precision}"] = worst
        print(precision, json.dumps(worst, indent=1), flush=True)
        found[f"layers, {precision}"] = layer_times(chosen.device, 512 if chosen.device == "cuda" else 16)
        found[f"steps, {precision}"] = step_times(chosen.device)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
