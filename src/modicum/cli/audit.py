"""`modicum audit`: what a run's experiment leaks at least, measured by playing it again with canaries."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def audit(
    run: Path = typer.Argument(help="The folder of a finished run."),
    method: str = typer.Option("one-run", "--method", help="one-run, canife or client-canaries."),
    canaries: int = typer.Option(1000, "--canaries", help="How many; CANIFE makes a tenth as many trials."),
    share: float = typer.Option(0.5, "--share", help="Of each client's records that canaries may replace."),
    seed: int = typer.Option(0, "--seed", help="Of canaries, coins and noise."),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """Play the run's experiment once more with canaries; what that proves stands in its certificate and report.

    Exit code 1 where more is proved than claimed.
    """
    from modicum.attacks.audits import Settings, refuse_real
    from modicum.attacks.audits import audit as play
    from modicum.config import experiment, read
    from modicum.federation.run_folder import RunFolder
    from modicum.runs import load, write_audit

    finished = load(run)
    refuse_real(finished.certificate.noise["simulation"])
    found = play(method, experiment(read(RunFolder(run).config)), Settings(canaries, share, seed))
    write_audit(finished, found)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        typer.echo(found.sentence())
        typer.echo("An audit proves leaks, never their absence. Written into certificate and report beside ε.")
    if found.broken:
        raise typer.Exit(1)
