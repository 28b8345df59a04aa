"""What a step on secret Poisson batches costs in passes of one shape: `python benchmarks/lanes.py`.

Seconds are of the process on one thread, so that others on the machine count little. Prints tables:
the time of a pass by its rows, the constants of the cost model, and steps by every shape with what was chosen.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Flat
from modicum.core.parts import Batch
from modicum.mechanisms.fixed_shapes import FixedShapes, shapes_for
from modicum.mechanisms.passes import clipped_in_passes
from modicum.models import build
from modicum.privacy.fixed_shapes import Capacity, FixedShape, Lanes, smallest_capacity
from modicum.training.plain import Supervised

MODELS = {
    "logistic": ((64,), {}),
    "mlp": ((784,), {}),
    "cnn-small": ((1, 28, 28), {}),
    "resnet18": ((3, 32, 32), {}),
}
ROWS = (4, 16, 64)
RECORDS = 2000
LOSSES = Supervised().losses  # one object: a new one would be looked into anew


def seconds(work: object, least: float = 0.6) -> float:
    """The fastest of a few, each repeated for a while."""
    work()  # type: ignore[operator]
    best, until = float("inf"), time.process_time() + least
    while time.process_time() < until:
        start = time.process_time()
        work()  # type: ignore[operator]
        best = min(best, time.process_time() - start)
    return best


class Model:
    """A model of the catalogue on random records."""

    def __init__(self, name: str) -> None:
        shape, options = MODELS[name]
        torch.manual_seed(0)
        model = build(name, shape, 10, **options)
        self.backend = LoopBackend(model)
        self.theta = self.backend.layout.read(model)
        some = 300 if name == "resnet18" else RECORDS
        self.records = Batch(torch.rand(some, *shape), {"y": torch.randint(10, (some,))})
        self.shapes: FixedShapes = shapes_for("auto", model, self.records.x)

    def step(self, rows: Tensor, shape: FixedShape | None) -> None:
        if shape is None:
            batch = self.records.take(rows)
            self.backend.clipped_sums(self.theta[None], [batch], LOSSES, [Flat(1.0)])
        else:
            clipped_in_passes(self.backend, self.theta, self.records, rows, LOSSES, Flat(1.0), shape)

    def drawn(self, shape: FixedShape | None, batch: int, seed: int) -> Tensor:
        rng, n = np.random.default_rng(seed), len(self.records)
        chosen = np.flatnonzero(rng.random(n) < batch / n)
        return torch.from_numpy(chosen if shape is None else shape.laid_out(chosen, n, rng.random))

    def mean_step(self, shape: FixedShape | None, batch: int) -> tuple[float, float]:
        """Seconds, and rows computed over rows drawn, in the mean over some draws."""
        draws = [(self.drawn(shape, batch, seed), self.drawn(None, batch, seed)) for seed in range(6)]
        took = [seconds(lambda rows=rows: self.step(rows, shape), 0.3) for rows, _ in draws]
        return float(np.mean(took)), sum(r.numel() for r, _ in draws) / sum(len(d) for _, d in draws)


def main() -> None:
    torch.set_num_threads(1)
    models = {name: Model(name) for name in MODELS}
    print("| model | parameter tensors | multiply-adds | pass of 4 | 16 | 64 |\n|---|---|---|---|---|---|")
    passes, left = [], []
    for name, model in models.items():
        times = []
        for rows in ROWS:
            shape = Lanes(rows)
            times.append(seconds(lambda rows=rows, shape=shape, m=model: m.step(torch.arange(rows)[None], shape)))
            passes.append([1.0, model.shapes.tensors, rows * model.shapes.work])
            left.append(times[-1])
        shown = " | ".join(f"{1e3 * t:.2f} ms" for t in times)
        print(f"| {name} | {model.shapes.tensors} | {model.shapes.work:,} | {shown} |")
    weights = 1 / np.array(left)  # relative errors
    found, *_ = np.linalg.lstsq(np.array(passes) * weights[:, None], np.ones(len(left)), rcond=None)
    print("\nPASS, TENSOR, PRODUCT =", ", ".join(f"{v:.2g}" for v in found))
    print()
    print(
        "| model | batch | ragged | lanes of 4 | 16 | 64 | capacity | chosen |\n|---|---|---|---|---|---|---|---|"
    )
    for name, model in models.items():
        n = len(model.records)
        for batch in (16, 64) if name == "resnet18" else (16, 64, 256):
            tried: list[FixedShape | None] = [None, *map(Lanes, ROWS), smallest_capacity(n, batch / n, 2.0**-50)]
            cells = [model.mean_step(shape, batch) for shape in tried]
            chosen = model.shapes.choose(n, batch / n, 1e-5, 1000)
            said = f"capacity {chosen.rows}" if isinstance(chosen, Capacity) else f"lanes of {chosen.rows}"
            shown = " | ".join(f"{1e3 * t:.2f} ms ({r:.2f})" for t, r in cells)
            print(f"| {name} | {batch} | {shown} | {said} |", flush=True)


if __name__ == "__main__":
    main()
