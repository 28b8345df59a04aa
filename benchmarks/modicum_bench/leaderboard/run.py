"""`modicum bench leaderboard`: choose on public records, then test, then write the page; each leaves a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum_bench.leaderboard.grid import CHOSEN_FOR, PRESETS, RATES, ROWS, STAND_IN, Cell
from modicum_bench.leaderboard.play import Trial, chosen_for, no_privacy, tried
from modicum_bench.leaderboard.report import page
from modicum_bench.pac_dp.cells import Progress, Workspace, runner
from modicum_bench.pac_dp.data import Folders

Say = Callable[[str], None]
CLIENTS = 50  # of the stand-in


def bench(
    preset: str,
    out: Path,
    backbones: Path,
    *,
    workers: int = 1,
    say: Say = print,
    progress: Progress | None = None,
) -> str:
    """The page as text. Settings and results that are there already are kept."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: use {' or '.join(PRESETS)}")
    out.mkdir(parents=True, exist_ok=True)
    with runner(Workspace(Folders(backbones, out)), workers, progress) as run:
        settings = _chosen(out / "settings.json", backbones, run, say)
        results = _played(out / "results.jsonl", PRESETS[preset], backbones, settings, run)
    return page(results, PRESETS[preset], out)


def _chosen(path: Path, backbones: Path, run: Any, say: Say) -> dict[str, float]:
    """For every tuned method, start and budget the rate with the best accuracy on ten letters (seed 0)."""
    if path.is_file():
        found: dict[str, float] = json.loads(path.read_text())
        return found
    trials = [
        Trial(backbones, Cell(STAND_IN, CLIENTS, budget, hot), name, rate, 0, public=True)
        for budget in CHOSEN_FOR
        for hot in (False, True)
        for name, row in ROWS.items()
        if row.tuned
        for rate in RATES
    ]
    best: dict[str, tuple[float, float]] = {}
    for trial, result in zip(trials, run(tried, trials), strict=True):
        key = _key(trial.method, trial.cell.hot, trial.cell.smallest)
        best[key] = max(best.get(key, (-1.0, 0.0)), (result.get("accuracy", -1.0), trial.rate))
    settings = {key: rate for key, (_, rate) in best.items()}
    path.write_text(json.dumps(settings, indent=1) + "\n")
    say(f"settings: {path}")
    return settings


def _key(method: str, hot: bool, budget: float) -> str:
    return f"{method}, {'hot' if hot else 'cold'}, {budget:g}"


def _played(
    path: Path, cells: Sequence[Cell], backbones: Path, settings: dict[str, float], run: Any
) -> list[dict[str, Any]]:
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    known = {(d["cell"], d["method"], d["seed"]) for d in done}

    def trials(names: Iterable[str], seeds: int | None = None) -> list[Trial]:
        every = (
            Trial(backbones, cell, name, settings.get(_key(name, cell.hot, chosen_for(cell)), 0.0), seed)
            for cell in cells
            for seed in range(seeds or cell.seeds)
            for name in names
        )
        return [t for t in every if (t.cell.name, t.method, t.seed) not in known]

    with path.open("a", encoding="utf-8") as file:
        for function, todo in ((tried, trials(ROWS)), (no_privacy, trials(["no privacy"], seeds=1))):
            for result in run(function, todo):
                done.append(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
    return done
