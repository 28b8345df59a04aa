"""`modicum fit-clipping`: PAC-DP's offline phase, from an experiment file with a [fit] table to a curve."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.config import Config
    from modicum.papers.pac_dp.fit import Fit
    from modicum.papers.pac_dp.grid import Grid

KEYS = {"budgets", "bounds", "seeds", "scale_free"}


def fit_clipping(
    file: Path = typer.Argument(..., help="An experiment in TOML with a public proxy and a [fit] table."),
    options: list[str] = typer.Option([], "--set", help="Change a setting: --set run.rounds=10 (repeatable)."),
    out: Path | None = typer.Option(None, "--out", help="The curve's file [default: FILE with .curve.json]."),
    cache: Path | None = typer.Option(None, "--cache", help="Folder of finished cells [default: OUT.cells]."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="Folder of dataset files (default: MODICUM_DATA, else the cache)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Nothing but the fit in JSON."),
) -> None:
    """Learn F(ε) on public records: simulate budgets × bounds, choose the best bound for each, fit a curve."""
    if data_dir is not None:
        options = [*options, f"data.dir={json.dumps(str(data_dir.absolute()), ensure_ascii=False)}"]
    config, grid, scale_free = _read(file, options)
    curve_file = out or file.with_suffix(".curve.json")
    from modicum.cli.progress import counting
    from modicum.cli.target import refuse_unwritable
    from modicum.config import experiment
    from modicum.papers.pac_dp.fit import fit_curve
    from modicum.papers.pac_dp.grid import simulate

    cells = cache or curve_file.with_suffix(".cells")
    refuse_unwritable(curve_file)
    built = experiment(config)
    with counting(quiet=as_json) as progress:
        matrix = simulate(built, grid, cells, progress)
    fit = fit_curve(matrix, scale_free)
    fit.curve.write(curve_file)
    picture = _picture(matrix, fit, curve_file)
    facts = _facts(fit, curve_file, picture)
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2, allow_nan=False) if as_json else _text(fit, facts))


def _read(file: Path, options: list[str]) -> tuple[Config, Grid, bool]:
    from modicum.config.read import check
    from modicum.config.source import read_source, with_option
    from modicum.papers.pac_dp.grid import Grid

    source = read_source(file)
    for option in options:
        source = with_option(source, option)
    tables = dict(source.tables)
    table = tables.pop("fit", None)
    if not isinstance(table, dict):
        raise source.error("there is no [fit] table: add one with budgets, bounds and seeds", "fit")
    for key in table:
        if key not in KEYS:
            raise source.error(f"unknown key fit.{key}: use {', '.join(sorted(KEYS))}", "fit", key)
    try:
        budgets, bounds = (tuple(float(v) for v in table[key]) for key in ("budgets", "bounds"))
        seeds = tuple(range(int(table.get("seeds", 3))))
    except KeyError as missing:
        raise source.error(f"fit.{missing.args[0]} must be given: add {missing.args[0]} = […]", "fit") from None
    except (TypeError, ValueError):
        raise source.error(
            "fit.budgets and fit.bounds are lists of numbers, fit.seeds is a number", "fit"
        ) from None
    with source.at("fit"):
        grid = Grid(budgets, bounds, seeds)
    return check(replace(source, tables=tables), file.parent), grid, bool(table.get("scale_free", False))


def _picture(matrix: Any, fit: Fit, curve_file: Path) -> Path | None:
    from modicum.errors import MissingExtraError
    from modicum.papers.pac_dp.pictures import draw_fit

    path = curve_file.with_suffix(".png")
    try:
        draw_fit(matrix, fit, path)
    except MissingExtraError:
        return None
    return path


def _facts(fit: Fit, curve_file: Path, picture: Path | None) -> dict[str, Any]:
    return {
        "curve": str(curve_file),
        "picture": None if picture is None else str(picture),
        "kind": fit.shape,
        "at_edge": fit.at_edge,
        "r2": fit.r2,
        "r2_raw": fit.r2_raw,
        "quadratic": asdict(fit.quadratic),
        "leave_one_out": {k: v if v < float("inf") else None for k, v in fit.errors.items()},
        "pairs": fit.pairs,
        "outliers": fit.outliers,
    }


def _text(fit: Fit, facts: dict[str, Any]) -> str:
    if not fit.pairs:
        raise UserError("no pairs are left after removing outliers: widen the grid")
    lines = [f"C* at ε={e:g}: {c:.4g}" for e, c in fit.pairs]
    lines += [f"outlier  ε={e:g}: {c:.4g}" for e, c in fit.outliers]
    if fit.shape == "constant":
        lines.append(
            f"a constant: C = {fit.curve.bounds[0]:.4g} whatever the budget, so a fixed bound does the same"
        )
    else:
        lines.append(
            f"{fit.kind} curve, R² = {fit.r2_raw:.3f} of C and {fit.r2:.3f} of log C; constant below "
            f"{fit.curve.inputs[0]:g} and above {fit.curve.inputs[-1]:g}"
        )
    lines.append(f"as printed, by least squares: {fit.quadratic}")
    if fit.at_edge:
        at = ", ".join(f"{e:g}" for e in fit.at_edge)
        lines.append(
            f"warning  at ε={at} the best bound is the smallest or largest that was tried: widen fit.bounds"
        )
    lines += [f"curve    {facts['curve']}", f"picture  {facts['picture'] or 'needs matplotlib'}"]
    lines.append(f'use it   [method] name = "pac-dp", curve = "{facts["curve"]}"')
    return "\n".join(lines)
