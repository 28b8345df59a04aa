"""Two tables beside the grid: CIFAR-10 behind a wider backbone, and CIFAR-100 with 100 clients.

    python -m modicum_bench.leaderboard.beside --backbones DIR --out benchmarks/leaderboard

Draws as in the grid, settings of rivals from settings.json there. What is in wide.jsonl and cifar-100.jsonl
already is not played again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from modicum_bench.leaderboard.grid import CHOICES, MESSAGES, SUM, TASKS, Cell
from modicum_bench.leaderboard.play import Draw, played
from modicum_bench.leaderboard.run import known_rows, settings_of

SEEDS = 3
WIDE = (
    Cell("cifar-10", 10, 8.0, hot=True),
    Cell("cifar-10", 50, 1.0, hot=True),
    Cell("cifar-10", 50, (0.5, 1.0, 5.0), hot=True),
)
HUNDRED = tuple(Cell("cifar-100", 100, 5.0, hot, view) for hot in (True, False) for view in (MESSAGES, SUM))
RIVALS = ("auto", "awdp-fl", "dp-sgd", "aqc", "class-means", "pac-dp")


def beside(backbones: Path, out: Path) -> None:
    """`auto` behind the wide backbone; with 100 clients the default and its nearest rivals."""
    wide = replace(TASKS["cifar-10"], backbone="cifar-100-wide.npz")
    with patch.dict(TASKS, {"cifar-10": wide}):
        _play(WIDE, ("auto",), backbones, out / "wide.jsonl", out)
    _play(HUNDRED, RIVALS, backbones, out / "cifar-100.jsonl", out)


def _play(cells: Iterable[Cell], methods: tuple[str, ...], backbones: Path, kept: Path, out: Path) -> None:
    settings = json.loads((out / "settings.json").read_text())
    known = known_rows(kept)
    for cell in cells:
        chosen = settings_of(cell, settings, backbones)
        for seed in range(SEEDS):
            left = [name for name in methods if (cell.name, name, seed) not in known]
            named = tuple((name, chosen.get(name, CHOICES[0])) for name in left)
            for found in played(Draw(backbones, cell, seed, named, kept)) if named else []:
                print(json.dumps(found), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The tables beside the leaderboard's grid.")
    parser.add_argument("--backbones", type=Path, required=True, help="folder of the backbones' weights")
    parser.add_argument("--out", type=Path, required=True, help="folder of settings.json, and for results")
    given = parser.parse_args()
    beside(given.backbones, given.out)


if __name__ == "__main__":
    main()
