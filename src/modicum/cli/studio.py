"""`modicum studio`: runs in the browser, from this machine alone."""

from __future__ import annotations

from pathlib import Path

import typer

from modicum.errors import UserError


def studio(
    folder: Path = typer.Argument(Path("runs"), help="The folder that holds the runs."),
    port: int = typer.Option(0, "--port", help="On this machine alone [default: a free one]."),
    no_browser: bool = typer.Option(False, "--no-browser", help="Print the address and open nothing."),
) -> None:
    """Watch, compare, plan and audit runs on a page of this machine; nothing is written to a run."""
    from modicum.studio.server import serve

    if not 0 <= port <= 65535:
        raise UserError(f"a port is a number from 1 to 65535, got {port}")

    def ready(address: str, once: str) -> None:
        typer.echo(f"studio  {address}")
        typer.echo("The address holds a secret: whoever has it can see these runs. Ctrl-C ends it.")
        if not no_browser:
            import webbrowser

            webbrowser.open(once)

    serve(folder, port, ready)
