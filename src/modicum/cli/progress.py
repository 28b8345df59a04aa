"""What is shown while many cells are played: a bar on a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

Count = Callable[[int, int], None]


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
