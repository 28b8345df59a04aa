"""The grid's tasks again on features of ImageNet networks: `auto` and its nearest rivals.

    python -m modicum_bench.leaderboard.networks --out benchmarks/backbones/networks --workers 12

Features are computed first, on a GPU where there is one. Rivals' settings are chosen on public stand-ins behind
the same network at the noises that cells have, and written down before the first cell is played. What matters
most is played first, and what is in results.jsonl is not played again: it may be ended at any time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from modicum.comparing.workers import work
from modicum.errors import UserError
from modicum_bench.leaderboard.figures import gathered, spread
from modicum_bench.leaderboard.grid import (
    CHOICES,
    MESSAGES,
    NETWORK,
    SMALLER,
    SUM,
    TASKS,
    WHOLE,
    Cell,
    Choice,
    Task,
    fraction,
    noise_of,
    unique,
)
from modicum_bench.leaderboard.play import NO_PRIVACY, Draw, played
from modicum_bench.leaderboard.report import markdown, summary
from modicum_bench.leaderboard.run import choose, known_rows, nearest, settings_of
from modicum_bench.leaderboard.tasks import STAND_INS, featured_public, records, undressed

SEEDS = 3
FIRST = ("auto", "dp-sgd", NO_PRIVACY)
THEN = ("awdp-fl", "aqc", "pac-dp", "fedacg", "class-means")  # nearest in the grid on our own backbones
METHODS = (*FIRST, *THEN)
RIVALS = tuple(name for name in METHODS if name != NO_PRIVACY)


def _on(name: str, network: str = NETWORK) -> str:
    return f"{name} on {network}"


def goals(network: str) -> tuple[Cell, ...]:
    """CIFAR-10 without a public label, from tight to loose."""
    task = _on("cifar-10", network)
    return (
        Cell(task, 50, 1.0),
        Cell(task, 50, 0.5),
        Cell(task, 50, 5.0),
        Cell(task, 50, 0.1, view=SUM),
        Cell(task, 50, 1.0, view=SUM),
        Cell(task, 10, 8.0),
    )


def hundred(features: str = "", *, hot: bool = False) -> tuple[Cell, ...]:
    """CIFAR-100 at a hundred clients, behind a sum and not."""
    return tuple(Cell(_on("cifar-100") + features, 100, 5.0, hot, view) for view in (SUM, MESSAGES))


def letters(features: str = "") -> tuple[Cell, ...]:
    """More classes than the public digits have."""
    task = _on("emnist-merge47:10-46") + features
    return Cell(task, 50, 5.0), Cell(task, 50, 1.0, view=SUM)


def some(name: str, place: int) -> tuple[Cell, ...]:
    """Half of the grid's cells of a task, two hot and two cold."""
    cells = fraction(TASKS[_on(name)], place)
    return tuple(cells[i] for i in (0, 1, 4, 5))


ALL = f", {WHOLE}"
HOT = (
    Cell(_on("cifar-10"), 50, 1.0, hot=True),
    Cell(_on("cifar-10"), 50, 5.0, hot=True),
    Cell(_on("cifar-10"), 10, 8.0, hot=True),
    Cell(_on("cifar-10"), 50, 1.0, hot=True, view=SUM),
)
CELLS = unique(
    *goals(NETWORK),
    *letters(),
    *letters(ALL),
    *hundred(),
    *hundred(ALL),
    *HOT,
    *goals(SMALLER),
    *hundred(hot=True),
    *some("fashion-mnist", 5),
    *some("emnist-merge47:10-46", 6),
    *some("svhn", 3),
)


def order(cells: Sequence[Cell]) -> Iterator[tuple[Cell, int, tuple[str, ...]]]:
    """`auto` beside DP-SGD in every cell, draw after draw; then the other rivals in the same order."""
    for methods in (FIRST, THEN):
        for seed in range(SEEDS):
            for cell in cells:
                yield cell, seed, tuple(m for m in methods if seed == 0 or m != NO_PRIVACY)


def play(cells: Sequence[Cell], out: Path, workers: int) -> None:
    """Choose, then play what is left."""
    out.mkdir(parents=True, exist_ok=True)
    here = Path()
    noises = sorted({nearest(noise_of(undressed(cell, here, 0), cell.view)) for cell in cells})
    stand_ins = [replace(one, backbone=NETWORK) for one in STAND_INS]
    choose(out, here, stand_ins=stand_ins, noises=noises, methods=METHODS, workers=workers)
    settings = json.loads((out / "settings.json").read_text())
    chosen: dict[Cell, dict[str, Choice]] = {c: settings_of(c, settings, here, METHODS) for c in cells}
    kept = out / "results.jsonl"
    known = known_rows(kept)
    todo = []
    for cell, seed, methods in order(cells):
        named = tuple((m, chosen[cell].get(m, CHOICES[0])) for m in methods if (cell.name, m, seed) not in known)
        todo += [Draw(here, cell, seed, named, kept)] if named else []
    for _ in work(played, todo, workers=workers):
        pass


def ready(tasks: Sequence[Task]) -> list[str]:
    """Compute all features; keys of the tasks whose data are here."""
    found = []
    for task in tasks:
        begun = time.monotonic()
        try:
            own, _ = records(task, Path())
        except UserError as error:
            print(f"{task.key}: left out ({error})", flush=True)
            continue
        found.append(task.key)
        print(f"{task.key}: {len(own.train)} + {len(own.test)}, {time.monotonic() - begun:.0f} s", flush=True)
    return found


def tables(out: Path) -> str:
    """`auto` beside public records and the ceiling, then every method of every cell."""
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found = gathered(lines, CELLS)
    rows = [[one.cell.name, *(spread(one.values.get(name, {})) for name in RIVALS)] for one in found]
    return f"{markdown(summary(found))}\n\n{markdown([['cell', *RIVALS], *rows])}\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The grid's tasks on features of ImageNet networks.")
    parser.add_argument("--out", type=Path, required=True, help="folder for settings and results")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tables", action="store_true", help="play nothing: the tables of what is there")
    parser.add_argument("--only", default="", help="cells whose name begins so")
    given = parser.parse_args()
    if given.tables:
        print(tables(given.out))
        return
    cells = [cell for cell in CELLS if cell.name.startswith(given.only)]
    here = ready([TASKS[key] for key in dict.fromkeys(cell.task for cell in cells)])
    for one in STAND_INS if not (given.out / "tried.jsonl").is_file() else ():  # else nothing is left to choose
        featured_public(replace(one, backbone=NETWORK), Path())
    play([cell for cell in cells if cell.task in here], given.out, given.workers)


if __name__ == "__main__":
    main()
