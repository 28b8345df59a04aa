"""`modicum bench fedmap`: Tables 3 and 4, Fig. 3 and the null models; quick on digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from modicum.comparing.workers import Play, Progress, players
from modicum.errors import UserError
from modicum_bench.fedmap.cells import LARGE, TASKS, TRAINED, VARIANTS, Cell
from modicum_bench.fedmap.cost import measured
from modicum_bench.fedmap.play import Part, Run, Workspace, chosen, fitted, played
from modicum_bench.fedmap.printed import Printed
from modicum_bench.fedmap.regimes import REGIMES
from modicum_bench.fedmap.report import differences, read, table

QUICK = ("digits",)
PAPER = (
    *("fashion-mnist", "cifar-10", "svhn", "fashion-mnist hog", "svhn hog", "cifar-10 features"),
    *(f"cifar-10 {LARGE}", f"svhn {LARGE}", *REGIMES),
)
SEEDS = {"quick": 3, "paper": 10}
TABLE, FIGURE, COST = "table 3", "fig 3", "cost"
PICTURE, PRINTED = "figure-3.png", "printed.md"  # Fig. 3, and the tables of both
OTHERS = (TABLE, FIGURE, COST)  # what is no cell of Table 4
CONSTANT, NO_NETWORK = "fixed", "auto-s"  # the latter alone stands for rivals on fixed features and for ResNet-18


def bench(
    preset: str,
    place: Workspace,
    *,
    only: Sequence[str] = (),
    seeds: int | None = None,
    workers: int = 1,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> str:
    """Plays what is missing in the place's folder, and gives all tables, which it writes to `tables.md` too."""
    if workers < 1:
        raise UserError(f"the number of workers must be at least 1, got {workers}")
    if seeds is not None and seeds < 1:
        raise UserError(f"the number of seeds must be at least 1, got {seeds}")
    wanted = tuple(only) or ((*QUICK, *OTHERS) if preset == "quick" else (*PAPER, *OTHERS))
    left_out = [task for task in wanted if task.endswith(" features") and place.backbone is None]
    for task in left_out:
        say(f"{task}: give a public backbone with --backbone; left out")
    tasks = [task for task in wanted if task not in (*OTHERS, *left_out)]
    place.out.mkdir(parents=True, exist_ok=True)
    with players(workers) as play:
        _cells(place, play, tasks, seeds or SEEDS[preset], say, progress)
        old = Printed(place, preset, play, progress)
        parts, printed = table_4(read(place.out)), []
        if TABLE in wanted:
            printed += ["### Table 3: as printed", old.table()]
        if FIGURE in wanted:
            printed += [f"### Fig. 3: {PICTURE}", old.figure(place.out / PICTURE)]
        if printed:
            (place.out / PRINTED).write_text("\n\n".join(printed) + "\n", encoding="utf-8")
        parts += printed
    if COST in wanted:
        parts += ["### Cost", measured()]
    text = "\n\n".join(parts)
    (place.out / "tables.md").write_text(text + "\n")
    return text


def _cells(
    place: Workspace,
    play: Play,
    tasks: Sequence[str],
    seeds: int,
    say: Callable[[str], None],
    progress: Progress | None,
) -> None:
    """Settings of all tasks, then all networks, then all runs."""
    columns = [(task, participation) for task in tasks for participation in TASKS[task].budgets]
    tunings = [Part(*column, variant) for column in columns for variant in _tuned(column[0])]
    settings = {}
    for part, choice in zip(tunings, play(partial(chosen, place), tunings, progress=progress), strict=True):
        settings[part.task, part.participation, part.what] = choice
        say(f"{part.task}, participation {part.participation:g}, {part.what}: {choice}")
    bodies = [
        Part(*column, body, settings[*column, CONSTANT])
        for column in columns
        if not _single(column[0])
        for body in sorted(set(TRAINED.values()))
    ]
    found = play(partial(fitted, place), bodies, progress=progress)
    networks = {(p.task, p.participation, p.what): path for p, path in zip(bodies, found, strict=True)}
    runs = [
        Run(
            Cell(task, participation, variant, seed),
            settings[task, participation, variant if variant in _tuned(task) else CONSTANT],
            networks.get((task, participation, TRAINED.get(variant, ""))),
        )
        for task, participation in columns
        for seed in range(1 if task.endswith(LARGE) else seeds)
        for variant in ([NO_NETWORK] if _single(task) else VARIANTS)
    ]
    for one, result in zip(runs, play(partial(played, place), runs, progress=progress), strict=True):
        say(f"{one.cell.name}: {result['accuracy']:.4f}")


def _tuned(task: str) -> tuple[str, ...]:
    """Variants with settings of their own; all others take those of a constant bound."""
    return (NO_NETWORK,) if _single(task) else (CONSTANT, NO_NETWORK)


def _single(task: str) -> bool:
    """A rival, or ResNet-18: one variant stands for it."""
    return " " in task


def table_4(results: Sequence[dict[str, Any]]) -> list[str]:
    """Accuracy of each task, then paired differences where a fixed bound and another have two seeds in common."""
    parts = []
    for task in dict.fromkeys(str(r["task"]) for r in results):
        parts += [f"### {task}", table(results, task)]
        for participation in TASKS[task].budgets:
            if shown := differences(results, task, participation):
                parts += [f"Participation {participation:g}:", shown]
    return parts
