"""`modicum bench pac-dp`: choose on public records, then test, then print; each stage leaves files behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modicum.bench.pac_dp.data import Folders
from modicum.bench.pac_dp.play import play
from modicum.bench.pac_dp.scratch import CELLS, play_scratch
from modicum.bench.pac_dp.settings import PRESETS, TASKS
from modicum.bench.pac_dp.tune import tune
from modicum.errors import UserError

Say = Callable[[str], None]
STAGES = ("choose", "test", "report", "scratch")


def bench(
    preset: str,
    stages: Sequence[str],
    out: Path,
    backbones: Path,
    cache: Path,
    *,
    only: Sequence[str] = (),
    data_dir: str | None = None,
    device: str = "cpu",
    say: Say = print,
) -> str:
    """The tables as text. A task whose settings or results are there already keeps them."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: use {' or '.join(PRESETS)}")
    chosen = PRESETS[preset]
    names = list(only) or list(chosen.tasks)
    if "scratch" in stages:
        play_scratch([cell for cell in only if cell in CELLS] or list(CELLS), out, data_dir, device)
    names = [name for name in names if name not in CELLS]
    for name in names:
        if name not in TASKS:
            raise UserError(f"unknown task {name!r}: use one of {', '.join(TASKS)}")
    folders = Folders(backbones, cache, data_dir)
    cache.mkdir(parents=True, exist_ok=True)
    for name in names:
        task, settings, results = TASKS[name], out / f"{name}.json", out / f"results-{name}.json"
        if "choose" in stages and not settings.is_file():
            tune(task, chosen, folders, out, device, say)
        if "test" in stages and not results.is_file():
            if not settings.is_file():
                raise UserError(f"there are no settings in {settings}: run the stage choose first")
            found: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
            records = play(task, PRESETS[found["preset"]], found, folders, out, device, say)
            results.write_text(_lines(records), encoding="utf-8")
    from modicum.bench.pac_dp.report import report

    return report(out) if "report" in stages else ""


def _lines(records: Sequence[dict[str, Any]]) -> str:
    """One cell a line, so that results can be compared as text."""
    rows = [json.dumps(_rounded(r), ensure_ascii=False, allow_nan=False) for r in records]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value
