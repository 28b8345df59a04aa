"""`modicum bench`: the measurements behind the tables in `benchmarks/`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@app.callback()
def bench() -> None:
    """Measure this machine."""


@app.command()
def speed(
    device: Device = typer.Option(Device.CPU, "--device", help="Where to measure."),
    threads: int = typer.Option(2, "--threads", help="Threads on a CPU."),
    only: list[str] = typer.Option([], "--only", help="Name of a row; may be repeated [default: all]."),
    out: Path | None = typer.Option(None, "--out", help="Folder for the figures as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """How fast private training is, beside plain training and the other libraries that are installed."""
    from modicum.bench.speed import measure_all

    typer.echo(measure_all(str(device), threads=threads, only=only, out=out, as_json=as_json))
