"""What is shown while a run goes on: a bar on a terminal, plain lines elsewhere, nothing for scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from modicum.report.curves import main_metric
from modicum.report.table import metric

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord
    from modicum.federation.simulation import Simulation
    from modicum.runs import Watch

Count = Callable[[int, int], None]


@contextmanager
def watching(title: str, *, quiet: bool) -> Iterator[Watch | None]:
    """A callback for each finished round."""
    if quiet:
        yield None
    elif sys.stderr.isatty() and sys.stdout.isatty():
        with _bar() as progress:
            yield _bar_watch(progress, title)
    else:
        yield lambda run, record: typer.echo(line(title, run, record))


@contextmanager
def counting(*, quiet: bool, unit: str = "cells") -> Iterator[Count | None]:
    """A callback for what is finished, of how many: a bar on a terminal, a line for each tenth elsewhere."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(unit, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _tenths(unit)


def _tenths(unit: str) -> Count:
    said = [0]

    def tell(done: int, total: int) -> None:
        if done == 1:  # of the next list
            said[0] = 0
        if done * 10 // total > said[0]:
            said[0] = done * 10 // total
            typer.echo(f"{unit.removesuffix('s')}={done} {unit}={total}", err=True)

    return tell


def line(title: str, run: Simulation, record: RoundRecord) -> str:
    """One round as key=value pairs."""
    pairs: dict[str, Any] = {"run": title, "round": record.round + 1, "rounds": run.experiment.rounds}
    pairs |= {f"simulated_{name}": f"{value:.4f}" for name, value in record.simulated.items()}
    pairs |= {f"public_{name}": f"{value:.4f}" for name, value in record.public.items()}
    pairs |= {
        f"released_{name}": _with_noise(value, record.noise.get(name)) for name, value in record.released.items()
    }
    pairs |= {"bound": f"{record.bound:.4g}", "answered": record.answered, "reserved": f"{record.reserved:.4f}"}
    pairs |= {name: f"{value:.4g}" for name, value in record.traffic.items()}
    pairs |= {"void": repr(record.void)} if record.void else {}
    return " ".join(f"{key}={value}" for key, value in pairs.items())


def _with_noise(value: float, std: float | None) -> str:
    return f"{value:.4f}" + ("" if std is None else f"±{std:.4f}")


def _bar() -> Any:
    """Fits 80 columns: method, rounds, accuracy, share of the budget reserved (R3), time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TextColumn("reserved {task.fields[reserved]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )


def _bar_watch(progress: Any, title: str) -> Watch:
    tasks: list[Any] = []

    def watch(run: Simulation, record: RoundRecord) -> None:
        if not tasks:
            fields = {"total": run.experiment.rounds, "completed": record.round, "accuracy": "", "reserved": "0%"}
            tasks.append(progress.add_task(title, **fields))
        shown: dict[str, Any] = {"reserved": f"{record.reserved:.0%}"}
        main = main_metric([record])
        if f"test_{main}" in record.simulated:
            shown["accuracy"] = f"{metric(main, record.simulated[f'test_{main}'])} (simulated)"
        progress.update(tasks[0], completed=record.round + 1, **shown)

    return watch
