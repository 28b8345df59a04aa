"""`modicum look`: figures of all clients' data together, paid for, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from modicum.errors import UserError


def look(
    path: Path = typer.Argument(help="An experiment in TOML, or the folder of a look that was taken."),
    epsilon: float | None = typer.Option(None, "--epsilon", help="What each client pays, e.g. 0.2."),
    of: str | None = typer.Option(
        None, "--of", help="Columns, e.g. age,pressure [default: all with a declared range]."
    ),
    statistics: str | None = typer.Option(
        None,
        "--statistics",
        help="classes, missing, moments, histograms, correlations [default: all but the last].",
    ),
    bins: int | None = typer.Option(None, "--bins", help="Bars of each histogram [default: 16]."),
    options: list[str] = typer.Option([], "--set", help="Change a setting, as in modicum run (repeatable)."),
    seed: int | None = typer.Option(None, "--seed", help="Short for --set run.seed=N."),
    out: Path | None = typer.Option(None, "--out", help="A new folder for the look [default: one under ./runs]."),
    as_json: bool = typer.Option(False, "--json", help="Nothing but the figures in JSON."),
) -> None:
    """Counts, missing shares, means, quantiles and histograms of all clients together, with error bars."""
    from modicum.preparing.look import finish
    from modicum.preparing.look import look as take
    from modicum.report.look import look_text
    from modicum.runs import new_folder

    if path.is_dir():
        if epsilon is not None or out is not None:
            raise UserError(f"{path} is a look that was taken: leave out --epsilon and --out")
        found, folder = finish(path), path
    else:
        if epsilon is None:
            raise UserError("a look is paid for: say what each client pays, e.g. --epsilon 0.2")
        folder = out or new_folder(f"look-{path.stem}")
        names = {"of": _names("--of", of), "statistics": _names("--statistics", statistics)}
        found = take(path, epsilon, **names, bins=bins, options=options, seed=seed, folder=folder)
    if as_json:
        told = {"folder": str(folder), **found.to_dict()}
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2, allow_nan=False))
        return
    typer.echo(look_text(found) + "\n")
    for name, what in (("look", folder), ("page", folder / "report.html"), ("verify", f"modicum verify {folder}")):
        typer.echo(f"{name:<12}{what}")


def _names(option: str, text: str | None) -> list[str]:
    """What an option lists. An empty list would mean everything, at everybody's expense: it is left away."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise UserError(f"{option} {text!r} names nothing: leave it out for the default, or give names, e.g. a,b")
    return names
