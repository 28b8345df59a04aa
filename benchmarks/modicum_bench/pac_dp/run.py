"""`modicum bench pac-dp`: choose on public records, then test, then print; each stage leaves files behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modicum.core.device import device_named
from modicum.errors import MissingExtraError, UserError
from modicum_bench.pac_dp.backbones import ensure
from modicum_bench.pac_dp.cells import Progress, Workspace, runner
from modicum_bench.pac_dp.data import Folders
from modicum_bench.pac_dp.play import play
from modicum_bench.pac_dp.scratch import CELLS, choose_scratch, play_scratch
from modicum_bench.pac_dp.settings import PRESETS, TASKS
from modicum_bench.pac_dp.tune import tune

Say = Callable[[str], None]
STAGES = ("choose", "test", "scratch", "report")


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
    workers: int = 1,
    say: Say = print,
    progress: Progress | None = None,
) -> str:
    """The tables as text. A task whose settings or results are there already keeps them."""
    if preset not in PRESETS:
        raise UserError(f"unknown preset {preset!r}: use {' or '.join(PRESETS)}")
    device_named(device)
    if workers < 1:
        raise UserError(f"the number of workers must be at least 1, got {workers}")
    for name in only:
        if name not in TASKS and name not in CELLS:
            raise UserError(f"unknown task {name!r}: use one of {', '.join([*TASKS, *CELLS])}")
    chosen = PRESETS[preset]
    names = [name for name in only if name in TASKS] if only else list(chosen.tasks)
    # A network that is trained from nothing takes a CPU a day: there it is run where it is asked for.
    able = [name for name, cell in CELLS.items() if chosen.scratch and (cell.linear or device != "cpu")]
    cells = [name for name in only if name in CELLS] if only else able
    place = Workspace(Folders(backbones, cache, data_dir, device), device)
    out.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    with runner(place, workers, progress) as run:
        for name in names:
            task, settings = TASKS[name], out / f"{name}.json"
            if {"choose", "test"} & set(stages):
                for backbone in task.backbones:
                    ensure(backbone, backbones, data_dir, device, chosen.pretraining, say)
            if "choose" in stages:
                tune(task, chosen, place, out, run, say)
            if "test" in stages:
                if not settings.is_file():
                    raise UserError(f"there are no settings in {settings}: run the stage choose first")
                found: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
                play(task, PRESETS[found["preset"]], found, out, run, say)
        if "choose" in stages:
            choose_scratch(cells, out, place, say)
        if "scratch" in stages:
            play_scratch(cells, out, run, say)
    if "report" not in stages:
        return ""
    from modicum_bench.pac_dp.figures import draw_all
    from modicum_bench.pac_dp.report import not_run, report

    text = report(out)
    try:
        draw_all(out, place.folders, out / "figures", say)
    except MissingExtraError as error:
        say(str(error))  # tables need no picture
    if missing := not_run(out):
        say(f"not run: {', '.join(missing)}")
    return text
