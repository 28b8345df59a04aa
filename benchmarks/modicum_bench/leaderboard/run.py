"""`modicum bench leaderboard`: choose on public records, then test, then write the page; each leaves a file."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modicum.comparing.workers import Progress, work
from modicum.errors import UserError
from modicum_bench.leaderboard.grid import CHOICES, PRESETS, ROWS, TASKS, Cell, Choice, noise_of
from modicum_bench.leaderboard.play import NO_PRIVACY, Draw, Try, played, tried
from modicum_bench.leaderboard.report import page
from modicum_bench.leaderboard.tasks import STAND_INS, StandIn, undressed

Say = Callable[[str], None]
STAGES = ("choose", "test", "report")
NOISES = (3e-4, 3e-3, 3e-5, 3e-2)  # that settings are chosen for; a cell takes those of the nearest, by logarithm
LIMITED = 1  # draws whose head without privacy is fitted, where all draws are judged on the same records
MOST = {"quick": 5}  # draws of a cell, where a preset is to end in a quarter of an hour on a busy machine too


def bench(
    preset: str,
    out: Path,
    backbones: Path,
    *,
    stages: Sequence[str] = STAGES,
    workers: int = 1,
    device: str = "cpu",
    say: Say = print,
    progress: Progress | None = None,
) -> str:
    """The page as text. Settings and results that are there already are kept."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: use {' or '.join(PRESETS)}")
    for stage in stages:
        if stage not in STAGES:
            raise UserError(f"unknown stage {stage!r}: use {', '.join(STAGES)}")
    if workers < 1:
        raise UserError(f"the number of workers must be at least 1, got {workers}")
    out.mkdir(parents=True, exist_ok=True)
    cells = PRESETS[preset]
    if "choose" in stages:
        choose(out, backbones, workers=workers, progress=progress)
        say(f"settings: {out / 'settings.json'}")
    if "test" in stages:
        play(out, backbones, cells, most=MOST.get(preset), workers=workers, device=device, progress=progress)
    return page(_lines(out / "results.jsonl"), cells, out) if "report" in stages else ""


def choose(
    out: Path,
    backbones: Path,
    *,
    stand_ins: Sequence[StandIn] = STAND_INS,
    noises: Sequence[float] = NOISES,
    methods: Collection[str] = ROWS,
    workers: int = 1,
    progress: Progress | None = None,
) -> None:
    """Every tuned method's choices on the stand-ins, into tried.jsonl, and the best into settings.json."""
    path = out / "tried.jsonl"
    known = {(r["stand_in"], r["noise"], r["hot"], r["method"]) for r in _lines(path)}
    todo = [
        Try(backbones, which, noise, hot, name)
        for noise in noises
        for hot in (True, False)
        for which in stand_ins
        for name, row in ROWS.items()
        if name in methods and row.tuned and (which.name, noise, hot, name) not in known
    ]
    with path.open("a", encoding="utf-8") as file:
        for found in work(tried, todo, workers=workers, progress=progress):
            file.writelines(json.dumps(one) + "\n" for one in found)
            file.flush()
    (out / "settings.json").write_text(json.dumps(best(_lines(path)), indent=1) + "\n")


def best(tries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Choice]]:
    """For each stand-in that is left out, and with none left out: method, start and noise → rate and bound.

    By mean accuracy over the stand-ins; a choice that is refused counts as nothing right.
    """
    found: dict[str, dict[str, Choice]] = {}
    for without in ("", *(s.name for s in STAND_INS)):
        scores: dict[str, dict[Choice, float]] = defaultdict(lambda: defaultdict(float))
        for one in tries:
            if one["stand_in"] != without:
                key = _key(one["method"], one["hot"], one["noise"])
                scores[key][one["rate"], one["clip"]] += one.get("accuracy", 0.0)
        found[without] = {key: max(by, key=lambda c: by[c]) for key, by in sorted(scores.items())}
    return found


def play(
    out: Path,
    backbones: Path,
    cells: Sequence[Cell],
    *,
    most: int | None = None,
    workers: int = 1,
    device: str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Every method of every cell, one seed after another; what is in results.jsonl is not played again."""
    if not (out / "settings.json").is_file():
        raise UserError("settings are chosen before the test is opened: run the stage choose first")
    settings = json.loads((out / "settings.json").read_text())
    left = draws(out / "results.jsonl", backbones, cells, settings, most)
    todo = [replace(draw, device=device) for draw in left]
    for _ in work(played, todo, workers=workers, progress=progress):
        pass


def draws(
    kept: Path, backbones: Path, cells: Sequence[Cell], settings: dict[str, Any], most: int | None = None
) -> Iterator[Draw]:
    """What is left to play, first draws first, at most so many of a cell."""
    known = known_rows(kept)
    chosen: dict[Cell, dict[str, Choice]] = {}
    for seed in range(max(cell.seeds for cell in cells))[:most]:
        for cell in cells:
            names = [*ROWS, *([NO_PRIVACY] if seed < LIMITED or cell.dealt else [])]
            left = [n for n in names if (cell.name, n, seed) not in known]
            if seed >= cell.seeds or not left:
                continue
            if cell not in chosen:
                chosen[cell] = settings_of(cell, settings, backbones)
            yield Draw(backbones, cell, seed, tuple((n, chosen[cell].get(n, CHOICES[0])) for n in left), kept)


def known_rows(kept: Path) -> set[tuple[str, str, int]]:
    """Cell, method and draw of every line of a file of results."""
    return {(r["cell"], r["method"], r["seed"]) for r in _lines(kept)}


def nearest(noise: float) -> float:
    """Of the noises that settings are chosen for."""
    return min(NOISES, key=lambda n: abs(math.log(n / noise)))


def settings_of(
    cell: Cell, settings: dict[str, Any], backbones: Path, methods: Collection[str] = ROWS
) -> dict[str, Choice]:
    """Those of the nearest noise, from stand-ins that hold none of the task's records."""
    without = next((s.name for s in STAND_INS if not s.serves(TASKS[cell.task].name)), "")
    noise = noise_of(undressed(cell, backbones, 0), cell.view)
    near = nearest(noise)
    chosen = settings[without]
    keys = {name: _key(name, cell.hot, near) for name, row in ROWS.items() if name in methods and row.tuned}
    if missing := [name for name, key in keys.items() if key not in chosen]:
        raise UserError(f"no settings were chosen for {', '.join(missing)}: run the stage choose again")
    return {name: tuple(chosen[key]) for name, key in keys.items()}


def _key(method: str, hot: bool, noise: float) -> str:
    return f"{method}, {'hot' if hot else 'cold'}, {noise:g}"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
