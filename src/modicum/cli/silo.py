"""`modicum silo`: hold one client's data, grant, ledger and noise, and answer a server's proposals."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from modicum.silo.silo import Silo

app = typer.Typer(
    help="One client of a deployment: its data, budget, ledger and noise in a process of its own.",
    no_args_is_help=True,
)
FILE = typer.Argument(help="The silo's own file, SILO.toml.")


@app.command("serve")
def serve(file: Path = FILE) -> None:
    """Answer proposals at the silo's local socket until stopped. Resumes where it was."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    from modicum.silo.serve import serve as run
    from modicum.silo.spec import read_spec

    spec = read_spec(file)
    run(spec, ready=lambda silo: typer.echo(f"{_line(silo)}\nlistening  {spec.socket}"))


@app.command("check")
def check(file: Path = FILE) -> None:
    """Read data and grant as `serve` would, say what would be granted, and stop."""
    from modicum.federation.run_folder import RunFolder
    from modicum.silo.silo import Silo
    from modicum.silo.spec import read_spec

    spec = read_spec(file)
    spec.folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(spec.folder).alone():
        silo = Silo(spec)
        try:
            typer.echo(_line(silo))
        finally:
            silo.close()


def _line(silo: Silo) -> str:
    spec, facts = silo.spec, silo.facts
    noise = "SIMULATED noise, which protects nobody" if spec.simulation else "cryptographic noise"
    state = f"in run {silo.taking_part.join.run}" if silo.taking_part else f"waits for run {spec.run!r}"
    return (
        f"silo       {facts.name}: {facts.records} records, ε ≤ {facts.budget:g}, δ ≤ {spec.grant.delta:g} per "
        f"{spec.grant.unit}, {noise}; {state}"
    )
