"""What the bound in floating point costs on a CPU: clipped sums before and after it, in turns in one process.

PYTHONPATH=src:OLD python benchmarks/speed_bound.py --before modicum_old [--threads 2] [--only mlp] [--seconds 20]
PYTHONPATH=src:OLD python benchmarks/speed_bound.py --before modicum_old --whole [--only mlp] [--seconds 20]

`--whole` times real runs of one client instead, with noise from the operating system: Poisson draw, clipped sum,
noise and descent, by round of as many steps; start and first round are left out.

`--before` names a package that holds the code as it was before sums were bounded in floating point, beside which
the present code is timed. To make one:

git archive 19ab1a6 src/modicum | tar x -C OLD && mv OLD/src/modicum OLD/modicum_old
grep -rl modicum OLD/modicum_old --include=*.py | xargs sed -i 's/\\bmodicum\\b/modicum_old/g'

Processor time and time by the clock, medians and best; processor times are exact on one thread.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from modicum.compute import Clipper, Flat
from modicum.core.memory import keep_pages
from modicum.models import build

Work = tuple[str, tuple[int, ...], int, bool]
Times = list[tuple[list[float], list[float]]]

WORK: dict[str, Work] = {
    "PAC-DP CNN, B=128, channels-last": ("cnn-small", (1, 28, 28), 128, True),
    "PAC-DP CNN, B=128": ("cnn-small", (1, 28, 28), 128, False),
    "PAC-DP CNN, a Poisson batch of 130": ("cnn-small", (1, 28, 28), 130, False),
    "PAC-DP CNN, a Poisson batch of 119": ("cnn-small", (1, 28, 28), 119, False),
    "ResNet-18-GN, B=16": ("resnet18", (3, 32, 32), 16, False),
    "MLP 784-64-10, B=10": ("mlp", (1, 28, 28), 10, False),
    "MLP 784-64-10, B=64": ("mlp", (1, 28, 28), 64, False),
    "MLP 784-64-10, B=256": ("mlp", (1, 28, 28), 256, False),
}


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def sums(before: str, name: str, shape: tuple[int, ...], batch: int, last: bool) -> list[Callable[[], object]]:
    """The same sum by either code."""
    model = build(name, shape, 10, seed=0)
    x, y = torch.rand(batch, *shape), torch.randint(10, (batch,))
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    old = importlib.import_module(f"{before}.clipping")
    then, now = old.Clipper(model), Clipper(model)
    return [lambda: then(losses, x, y, old.Flat(1.0)), lambda: now(losses, x, y, Flat(1.0))]


def timed(ways: list[Callable[[], object]], seconds: float) -> Times:
    """(processor times, times by the clock) of each way, in turns."""
    found: Times = [([], []) for _ in ways]
    for way in ways:
        way()
        way()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found[0][0]) < 5:
        for way, (own, clock) in zip(ways, found, strict=True):
            start = time.process_time(), time.perf_counter()
            way()
            own.append(time.process_time() - start[0])
            clock.append(time.perf_counter() - start[1])
    return found


RECORDS = 2000
STEPS = {"resnet18": 2, "cnn-small": 20, "mlp": 200}
"""Steps of a round in a run, so that what a round costs by itself is little."""


def run_times(package: str, name: str, shape: tuple[int, ...], batch: int) -> list[tuple[float, float]]:
    """(Processor time, time by the clock) of a step, for each round of a short run but the first."""
    mo, steps = importlib.import_module(package), STEPS[name]
    torch.manual_seed(0)
    records = TensorDataset(torch.rand(RECORDS, *shape), torch.randint(10, (RECORDS,)))
    federation = mo.Federation(mo.federate(mo.from_torch([records], classes=10)), (8.0,))
    stamps: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        mo.train(
            federation,
            method=mo.methods.DpSgd(batch=batch, steps=steps, lr=0.01),
            model=name,
            rounds=4,
            simulation=False,
            folder=f"{folder}/run",
            watch=lambda *_: stamps.append((time.process_time(), time.perf_counter())),
        )
    return [((b[0] - a[0]) / steps, (b[1] - a[1]) / steps) for a, b in itertools.pairwise(stamps)]


def runs_timed(packages: list[str], work: Work, seconds: float) -> Times:
    """Of runs by either code, in turns."""
    found: Times = [([], []) for _ in packages]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not found[-1][0]:
        for package, (own, clock) in zip(packages, found, strict=True):
            times = run_times(package, *work[:3])
            own.extend(t for t, _ in times)
            clock.extend(t for _, t in times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--whole", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    keep_pages()
    print("| work | before, ms | after, ms | ratio (best) | by the clock |\n|---|---|---|---|---|")
    for name, work in WORK.items():
        if chosen.only.lower() not in name.lower() or (chosen.whole and (work[3] or "Poisson" in name)):
            continue
        if chosen.whole:
            found = runs_timed([chosen.before, "modicum"], work, chosen.seconds)
        else:
            found = timed(sums(chosen.before, *work), chosen.seconds)
        (own, clock), (own_now, clock_now) = found
        then, now = (1e3 * statistics.median(t) for t in (own, own_now))
        by_clock = statistics.median(clock_now) / statistics.median(clock)
        best = min(own_now) / min(own)
        print(f"| {name} | {then:.3g} | {now:.3g} | {now / then:.2f} ({best:.2f}) | {by_clock:.2f} |", flush=True)


if __name__ == "__main__":
    main()
