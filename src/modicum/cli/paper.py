"""`modicum paper`: the tables and figures of one of the four papers, beside what it prints."""

from __future__ import annotations

from pathlib import Path

import typer

from modicum.errors import UserError

NAMES = ("pac-dp", "acdp-pfsd", "fedmap", "fedcompdp")


def paper(
    name: str = typer.Argument(..., help="pac-dp, acdp-pfsd, fedmap or fedcompdp."),
    quick: bool = typer.Option(False, "--quick", help="Play its rows on embedded digits now: minutes on 2 cores."),
    fresh: bool = typer.Option(
        False, "--fresh", help="Play every table from nothing: datasets, and a GPU or a day for the networks."
    ),
    out: Path | None = typer.Option(None, "--out", help="Folder for what is played [default: runs/paper-NAME]."),
) -> None:
    """A paper's tables and figures from stored results, its rows as printed and sound with both figures of ε.

    Nothing is computed without --quick or --fresh.
    """
    from modicum.cli.bench import find, writable

    if name not in NAMES:
        raise UserError(f"unknown paper {name!r}: choose one of {', '.join(NAMES)}")
    if quick and fresh:
        raise UserError("--quick plays a little and --fresh everything: choose one")
    find()
    from modicum_bench.papers import run

    folder = writable(out or Path("runs") / f"paper-{name}")
    if quick:
        typer.echo(run.quick(name, folder, typer.echo))
    elif fresh:
        typer.echo(run.fresh(name, folder, typer.echo))
    else:
        typer.echo(run.stored(name))
