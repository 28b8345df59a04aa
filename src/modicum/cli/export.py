"""`modicum export`: a finished run's model for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import typer


def export(
    folder: Path = typer.Argument(help="A finished run."),
    to: str = typer.Option("safetensors", "--to", help="state-dict, safetensors, hugging-face, peft or onnx."),
    out: Path = typer.Option(..., "--out", help="A new file; for hugging-face and peft a new folder."),
    as_json: bool = typer.Option(False, "--json", help="Where it lies, in JSON."),
) -> None:
    """Write a run's model as weights, a Hugging Face folder, an adapter or ONNX."""
    from modicum.runs import load

    path = load(folder).export(out, to)
    typer.echo(json.dumps({"model": str(path), "format": to}) if as_json else f"{to}: {path}")
