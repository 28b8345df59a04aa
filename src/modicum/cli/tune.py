"""`modicum tune`: choose among settings, within one budget for the winner and the search."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def tune(
    file: Path = typer.Argument(help="An experiment in TOML, with a declared metric to judge by."),
    grid: list[str] = typer.Option(..., "--grid", help="Values of a setting: method.lr=0.5,1,2 (repeatable)."),
    epsilon: float = typer.Option(..., "--epsilon", help="What each client pays for all of it."),
    way: str = typer.Option(
        "stopping",
        "--way",
        help="stopping (only the curator sees trials), split (each is paid for), threefold, public (stand-ins).",
    ),
    mean: float | None = typer.Option(
        None, "--mean", help="Trials in the mean, of random stopping [default: as many as settings]."
    ),
    law: str | None = typer.Option(
        None, "--law", help="Of the number of trials: logarithmic, geometric, poisson [default: the cheapest]."
    ),
    public: Path | None = typer.Option(None, "--public", help="An experiment of public stand-ins."),
    options: list[str] = typer.Option([], "--set", help="Change a setting, as in modicum run (repeatable)."),
    seed: int = typer.Option(0, "--seed", help="Of everything that a simulation draws."),
    out: Path | None = typer.Option(
        None, "--out", help="A new folder for the winner [default: one under ./runs]."
    ),
    as_json: bool = typer.Option(False, "--json", help="Nothing but the outcome in JSON."),
) -> None:
    """Settings at a stated price: by random stopping, by splitting the budget, or on public stand-ins."""
    from modicum.preparing.tune import CURATOR
    from modicum.preparing.tune import tune as search

    found = search(
        file, grid, epsilon, way=way, mean=mean, law=law, public=public, options=options, seed=seed, folder=out
    )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False, indent=2, allow_nan=False))
        return
    chosen = "nothing: no trial was made" if found.winner is None else json.dumps(found.winner, ensure_ascii=False)
    lines = [
        ("chosen", chosen),
        ("ε in all", f"{found.epsilon:.4g} for winner and search"),
        ("folder", found.folder),
    ]
    if found.score is not None:
        lines.insert(1, ("score", f"{found.score:.4g}"))
    if way in ("stopping", "threefold"):
        lines.append(("keep secret", f"{found.folder}{CURATOR}, and how long this took"))
    if found.warning:
        lines.append(("warning", found.warning))
    lines.append(("verify", f"modicum verify {found.folder}"))
    for name, what in lines:
        typer.echo(f"{name:<12}{what}")
