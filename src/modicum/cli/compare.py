"""`modicum compare`: methods, seeds and settings side by side, with differences seed by seed."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from modicum.errors import UserError


def compare(
    files: list[Path] = typer.Argument(None, help="Experiments in TOML; left out with --resume."),
    methods: str = typer.Option("", "--methods", help="Instead of the file's own: dp-sgd,aqc,pac-dp."),
    seeds: int = typer.Option(5, "--seeds", help="How many: 5 means 0 to 4."),
    options: list[str] = typer.Option(
        [], "--set", help="As in modicum run; dp-sgd:method.lr=4 is for one method alone (repeatable)."
    ),
    grid: list[str] = typer.Option(
        [], "--grid", help="Several values of a setting: privacy.budgets=0.5,1,8 (repeatable: all pairs)."
    ),
    against: str | None = typer.Option(
        None, "--against", help="Method (or file) that differences refer to [default: the first]."
    ),
    workers: int = typer.Option(1, "--workers", help="Runs at a time, each in a process of its own."),
    ray: str | None = typer.Option(None, "--ray", help='Address of a Ray cluster to run on, or "local".'),
    out: Path | None = typer.Option(None, "--out", help="A new folder [default: one under ./runs]."),
    resume: Path | None = typer.Option(None, "--resume", help="Go on with the comparison in this folder."),
    track: list[str] = typer.Option(
        [], "--track", help="Also tell tensorboard[:FOLDER] or mlflow[:URI] of every run (repeatable)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Nothing but the results in JSON at the end."),
    as_csv: bool = typer.Option(False, "--csv", help="Nothing but a line for each run at the end."),
) -> None:
    """Run several methods with several seeds; mean, spread and paired differences in one table and page."""
    from modicum import comparing
    from modicum.cli.progress import counting

    if as_json and as_csv:
        raise UserError("--json and --csv each print nothing else: give one of them")
    if resume is None and not files:
        raise UserError("give an experiment file, e.g. modicum compare examples/digits.toml --methods dp-sgd,aqc")
    if resume is not None and (files or methods or options or grid or out):
        raise UserError("--resume goes on with what is in the folder: leave out files, settings and --out")
    try:
        with counting(quiet=as_json or as_csv) as progress:
            if resume is not None:
                found = comparing.resume(resume, workers=workers, ray=ray, track=track, progress=progress)
            else:
                names = [name.strip() for name in methods.split(",") if name.strip()]
                found = comparing.compare(
                    files, methods=names, seeds=seeds, options=options, grid=grid,
                    workers=workers, ray=ray, against=against, folder=out, track=track, progress=progress,
                )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("modicum: stopped; go on with: modicum compare --resume FOLDER", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(found.to_dict(against), ensure_ascii=False, indent=2, allow_nan=False))
    elif as_csv:
        typer.echo(found.to_csv(), nl=False)
    else:
        typer.echo(f"\n{found.table(against)}\n\nfolder  {found.folder}\nreport  {found.folder / 'report.html'}")
