"""What the bound in floating point costs on a CPU: the code before it and the present one, in turns.

PYTHONPATH=src:OLD python benchmarks/speed_bound.py --before modicum_old [--threads 1 2] [--only mlp] [--share 0.1]

Two kinds of rows. "Sum": a clipped sum of one batch. "Step": a whole private step of a run of one client, from
one clipped sum to the next: Poisson draw, sum, noise from the operating system, descent and books, all by the
present code but for the sum, which is taken by either code in turns. `--runs` times whole runs by either code
instead, with all that has changed besides.

`--before` names a package that holds the code as it was before sums were bounded in floating point. To make one:

git archive 19ab1a6 src/modicum | tar x -C OLD && mv OLD/src/modicum OLD/modicum_old
grep -rl modicum OLD/modicum_old --include=*.py | xargs sed -i 's/\\bmodicum\\b/modicum_old/g'

Turns of four calls each in one process, either code first as often as second; a turn's first call is left out.
Medians with quartiles of the times, and of the ratios of neighbouring turns, by the clock and of the processor,
for which a thread that waits for the other works too. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import modicum as mo
from modicum.compute import Clipper, Flat
from modicum.compute.clipping import loop
from modicum.core.memory import keep_pages
from modicum.models import build

Way = Callable[[], object]
Stamp = tuple[float, float]
Pair = tuple[Stamp, Stamp]

DIGITS, COLOURS = (1, 28, 28), (3, 32, 32)
WORK: dict[str, tuple[str, tuple[int, ...], int, bool, float]] = {
    "logistic 784-10, B=64": ("logistic", DIGITS, 64, False, 5),
    "MLP 784-64-10, B=10": ("mlp", DIGITS, 10, False, 5),
    "MLP 784-64-10, B=64": ("mlp", DIGITS, 64, False, 5),
    "MLP 784-64-10, B=256": ("mlp", DIGITS, 256, False, 5),
    "PAC-DP CNN, B=128": ("cnn-small", DIGITS, 128, False, 12),
    "PAC-DP CNN, B=128, channels-last": ("cnn-small", DIGITS, 128, True, 8),
    "PAC-DP CNN, a Poisson batch of 130": ("cnn-small", DIGITS, 130, False, 8),
    "LeNet with sigmoids, B=64": ("lenet-sigmoid", DIGITS, 64, False, 6),
    "ResNet-18-GN, B=16": ("resnet18", COLOURS, 16, False, 38),
}
"""Model, records, batch, channels-last, and the seconds of a row."""

TURN = 4
"""Calls of one code in a row; the first finds caches and freed memory as the other code left them."""

RECORDS = 2000
STEPS = 10_000
"""Steps of a round that nobody waits for the end of."""
ROUND = {"resnet18": 2, "cnn-small": 20}
"""Steps of a round in a whole run: of other models, 200."""

TIMES, RATIOS = ("before, ms", "after, ms"), ("ratio (best)", "of neighbours", "processor", "of neighbours")
HEAD = ("", "work", "threads", *TIMES, *RATIOS, "pairs")


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def now() -> Stamp:
    return time.process_time(), time.perf_counter()


def between(start: Stamp, end: Stamp) -> Stamp:
    return end[0] - start[0], end[1] - start[1]


def turns() -> Iterable[int]:
    """0, 1, 1, 0, and again, each `TURN` times."""
    return (which for which in itertools.cycle((0, 1, 1, 0)) for _ in range(TURN))


def paired(times: list[tuple[int, Stamp]]) -> list[Pair]:
    """(Before, after) of neighbouring turns: the median of each, without its first call."""
    whole = len(times) // (2 * TURN) * 2 * TURN
    found = []
    for start in range(0, whole, 2 * TURN):
        two = [times[start + 1 : start + TURN], times[start + TURN + 1 : start + 2 * TURN]]
        own = [tuple(map(statistics.median, zip(*(stamp for _, stamp in turn), strict=True))) for turn in two]
        found.append((own[0], own[1]) if two[0][0][0] == 0 else (own[1], own[0]))
    return found


def sums(before: str, name: str, shape: tuple[int, ...], batch: int, last: bool) -> list[Way]:
    """The same sum by either code."""
    model = build(name, shape, 10, seed=0)
    x, y = torch.rand(batch, *shape), torch.randint(10, (batch,))
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    old = importlib.import_module(f"{before}.clipping")
    then, after = old.Clipper(model), Clipper(model)
    return [lambda: then(losses, x, y, old.Flat(1.0)), lambda: after(losses, x, y, Flat(1.0))]


def sum_times(ways: list[Way], seconds: float) -> list[Pair]:
    """Of each way's calls in turns."""
    for way in ways * 2:
        way()
    found, until = [], time.perf_counter() + seconds
    for which in turns():
        start = now()
        ways[which]()
        found.append((which, between(start, now())))
        if time.perf_counter() > until and len(found) >= 6 * TURN:
            return paired(found)
    raise AssertionError


class EnoughError(Exception):
    """The seconds are over."""


class InTurns:
    """A clipper that asks either code in turns, and notes when it was asked."""

    def __init__(self, before: str, model: torch.nn.Module, seconds: float) -> None:
        self.old = importlib.import_module(f"{before}.clipping")
        self.then, self.after, self.turns = self.old.Clipper(model), Clipper(model), iter(turns())
        self.operations, self.seconds = self.after.operations, seconds
        self.asked: list[tuple[int, Stamp]] = []

    def __call__(self, loss: Any, x: Any, y: Any, clip: Flat) -> Any:
        self.asked.append((next(self.turns), now()))
        if self.asked[-1][1][1] - self.asked[0][1][1] > self.seconds and len(self.asked) > 8 * TURN:
            raise EnoughError
        if self.asked[-1][0]:
            return self.after(loss, x, y, clip)
        return self.then(loss, x, y, self.old.Flat(clip.C))

    @property
    def times(self) -> list[Pair]:
        """Of whole steps, from one sum to the next; each code's first turn is left out."""
        steps = [(which, between(a, b)) for (which, a), (_, b) in itertools.pairwise(self.asked)]
        return paired(steps[2 * TURN :])


def step_times(before: str, name: str, shape: tuple[int, ...], batch: int, seconds: float) -> list[Pair]:
    """Of whole private steps by the present code, with sums by either."""
    asked: list[InTurns] = []

    def clipper(model: torch.nn.Module, _way: object) -> InTurns:
        asked.append(InTurns(before, model, seconds))
        return asked[-1]

    loop.Clipper = clipper  # type: ignore[misc, assignment]
    try:
        train(mo, name, shape, batch, STEPS, 1, lambda *_: None)
    except EnoughError:
        return max((one.times for one in asked), key=len)
    finally:
        loop.Clipper = Clipper  # type: ignore[misc]
    raise AssertionError


def train(
    package: Any,
    name: str,
    shape: tuple[int, ...],
    batch: int,
    steps: int,
    rounds: int,
    watch: Callable[..., None],
) -> None:
    """A run of one client with noise from the operating system."""
    torch.manual_seed(0)
    records = TensorDataset(torch.rand(RECORDS, *shape), torch.randint(10, (RECORDS,)))
    federation = package.Federation(package.federate(package.from_torch([records], classes=10)), (8.0,))
    method = package.methods.DpSgd(batch=batch, steps=steps, lr=0.01)
    with tempfile.TemporaryDirectory() as folder:
        package.train(
            federation,
            method=method,
            model=name,
            rounds=rounds,
            simulation=False,
            folder=f"{folder}/run",
            watch=watch,
        )


def run_times(before: str, name: str, shape: tuple[int, ...], batch: int, seconds: float) -> list[Pair]:
    """Of a step in whole runs by either code, in turns; start and first round are left out."""
    packages, found = [importlib.import_module(before), mo], []
    steps, until = ROUND.get(name, 200), time.perf_counter() + seconds
    for which in itertools.cycle((0, 1, 1, 0)):
        stamps: list[Stamp] = []
        train(packages[which], name, shape, batch, steps, 4, lambda *_, to=stamps: to.append(now()))
        own, clock = between(stamps[0], stamps[-1])
        count = steps * (len(stamps) - 1)
        found += [(which, (own / count, clock / count))] * TURN
        if time.perf_counter() > until and len(found) >= 6 * TURN:
            return paired(found)
    raise AssertionError


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def line(kind: str, name: str, threads: int, pairs: list[Pair]) -> str:
    """A row of the table: times by the clock, ratios by the clock and of the processor."""
    ratios = []
    for axis in (1, 0):
        then, after = ([pair[way][axis] for pair in pairs] for way in (0, 1))
        whole = statistics.median(after) / statistics.median(then)
        neighbours = quartiles([b / a for a, b in zip(then, after, strict=True)])
        ratios.append(f"{whole:.3f} ({min(after) / min(then):.3f}) | {neighbours}")
    times = (quartiles([1e3 * pair[way][1] for pair in pairs]) for way in (0, 1))
    return f"| {kind} | {name} | {threads} | {' | '.join([*times, *ratios])} | {len(pairs)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="")
    parser.add_argument("--kinds", nargs="+", default=["sum", "step"])
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--share", type=float, default=1.0, help="of each row's seconds")
    chosen = parser.parse_args()
    keep_pages()
    for cells in (HEAD, ("---",) * len(HEAD)):
        print(f"| {' | '.join(cells)} |")
    kinds = ["run"] if chosen.runs else chosen.kinds
    for (title, (*work, last, seconds)), kind, threads in itertools.product(WORK.items(), kinds, chosen.threads):
        if chosen.only.lower() not in title.lower() or (kind != "sum" and (last or "Poisson" in title)):
            continue
        torch.set_num_threads(threads)
        if kind == "sum":
            pairs = sum_times(sums(chosen.before, *work, last), chosen.share * seconds)
        else:
            timed = run_times if kind == "run" else step_times
            pairs = timed(chosen.before, *work, chosen.share * seconds)
        print(line(kind, title, threads, pairs), flush=True)


if __name__ == "__main__":
    main()
