"""`modicum audit`: what a run's experiment leaks at least, measured by playing it again with canaries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import typer

from modicum.errors import UserError


def audit(
    run: Path = typer.Argument(help="The folder of a finished run."),
    method: str = typer.Option("one-run", "--method", help="one-run, canife or client-canaries."),
    canaries: int = typer.Option(1000, "--canaries", help="How many; CANIFE makes a tenth as many trials."),
    share: float = typer.Option(0.5, "--share", help="Of each client's records that canaries may replace."),
    seed: int = typer.Option(0, "--seed", help="Of canaries, coins and noise."),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """Play the run's experiment once more with canaries, and write what that proves beside ε into its certificate.

    Exit code 1 where more is proved than claimed.
    """
    from modicum.attacks.audits import Settings, refuse_real
    from modicum.attacks.audits import audit as play
    from modicum.config import experiment, read
    from modicum.federation.run_folder import RunFolder
    from modicum.privacy.certificate import Certificate

    files = RunFolder(run)
    if not files.config.is_file() or not files.certificate.is_file():
        raise UserError(f"{run} is no finished run: it needs config.toml and certificate.json")
    certificate = Certificate.read(files.certificate)
    refuse_real(certificate.noise["simulation"])
    found = play(method, experiment(read(files.config)), Settings(canaries, share, seed))
    replace(certificate, audit=found.to_dict()).write(files.certificate)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        typer.echo(found.sentence())
        typer.echo("An audit proves leaks, never their absence. Written into the certificate beside ε.")
    if found.broken:
        raise typer.Exit(1)
