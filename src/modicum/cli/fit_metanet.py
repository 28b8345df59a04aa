"""`modicum fit-metanet`: FedMAP's offline phase, from an experiment file with a [metanet] table to a network."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from modicum.config import Config
    from modicum.papers.fedmap.fit import Fitted, Schedule


def fit_metanet(
    file: Path = typer.Argument(..., help="An experiment in TOML with a public proxy; [metanet] says how long."),
    options: list[str] = typer.Option([], "--set", help="Change a setting: --set run.rounds=10 (repeatable)."),
    out: Path | None = typer.Option(None, "--out", help="The network's file [default: FILE with .metanet.npz]."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="Folder of dataset files (default: MODICUM_DATA, else the cache)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Nothing but the outcome in JSON."),
) -> None:
    """Train FedMAP's network on simulations of public records; writes it, a picture, and what it wins there."""
    if data_dir is not None:
        options = [*options, f"data.dir={json.dumps(str(data_dir.absolute()), ensure_ascii=False)}"]
    config, schedule = _read(file, options)
    target = out or file.with_suffix(".metanet.npz")
    from modicum.cli.progress import counting
    from modicum.cli.target import refuse_unwritable
    from modicum.config import experiment
    from modicum.papers.fedmap.fit import fit_metanet as fit

    refuse_unwritable(target)
    with counting(quiet=as_json) as progress:
        found = fit(experiment(config), schedule, target, progress)
    facts = _facts(found, target, _picture(found, target))
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2) if as_json else _text(facts))


def _read(file: Path, options: list[str]) -> tuple[Config, Schedule]:
    from modicum.config.read import check, read_table
    from modicum.config.source import read_source, with_option
    from modicum.papers.fedmap.fit import Schedule

    source = read_source(file)
    for option in options:
        source = with_option(source, option)
    tables = dict(source.tables)
    schedule: Schedule = read_table(source, Schedule, "metanet", tables.pop("metanet", {}))
    return check(replace(source, tables=tables), file.parent), schedule


def _picture(found: Fitted, target: Path) -> Path | None:
    from modicum.errors import MissingExtraError
    from modicum.papers.fedmap.pictures import draw_decisions

    path = target.with_suffix(".png")
    try:
        draw_decisions(found.decisions, found.losses, path)
    except MissingExtraError:
        return None
    return path


def _facts(found: Fitted, target: Path, picture: Path | None) -> dict[str, Any]:
    gains = found.gains
    spread = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return {
        "network": str(target),
        "picture": None if picture is None else str(picture),
        "gain": statistics.fmean(gains),
        "standard_error": spread,
        "pays": spread is not None and statistics.fmean(gains) > 2 * spread,
        "gains": list(gains),
        "decisions": [list(d) for d in found.decisions],
    }


def _text(facts: dict[str, Any]) -> str:
    spread = facts["standard_error"]
    error = "" if spread is None else f" ± {100 * spread:.2f} (standard error of {len(facts['gains'])})"
    return "\n".join(
        [
            f"gain     {100 * facts['gain']:+.2f} points{error} over constant bound and noise, on public records",
            f"network  {facts['network']}",
            f"picture  {facts['picture'] or 'needs matplotlib'}",
            f'use it   [method] name = "fedmap", network = "{facts["network"]}"'
            if facts["pays"]
            else 'no gain  is clear of chance: use [method] name = "fedmap", clipping = "auto", kinds = []',
        ]
    )
