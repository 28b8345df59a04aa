"""`modicum certificate`: a deployed run's certificates in one signed file, for an auditor who has nothing else."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(help="Signed certificates of a deployed run, for an auditor.", no_args_is_help=True)


@app.command("export")
def export(
    places: list[Path] = typer.Argument(help="Folders of server and silos, or files of attested certificates."),
    out: Path = typer.Option(..., "--out", help="A new file."),
) -> None:
    """Put what each party signed into one file; `modicum verify FILE` checks it without any ledger.

    The folder of a finished run's server has the silos' parts too.
    """
    from modicum.deploy.silo.attested import read_attested, write_attested
    from modicum.errors import UserError

    if out.exists():
        raise UserError(f"{out} is there already: choose another file")
    parts = [part for place in places for part in read_attested(place)]
    write_attested(out, parts)
    typer.echo(f"{out}: signed by {', '.join(sorted({part.party for part in parts}))}")
