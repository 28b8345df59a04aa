"""`modicum doctor`: what this installation has, what it lacks, and what that stops."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from modicum import __version__

# What a person wants to do, the packages behind it, and the extra that brings them.
WISHES = (
    ("the studio, in a browser", ("starlette", "uvicorn"), "studio"),
    ("keys of silos, secure aggregation", ("cryptography",), "secure"),
    ("deployments on Flower", ("flwr", "cryptography"), "deploy"),
    ("data frames", ("pandas",), "frames"),
    ("rounds in TensorBoard and MLflow", ("tensorboard", "mlflow"), "track"),
    ("models and tokenizers of Hugging Face", ("transformers", "tokenizers"), "text"),
    ("FedMAP with a pretrained encoder", ("transformers",), "metanet"),
    ("runs and comparisons on a Ray cluster", ("ray",), "ray"),
)
LIBRARIES = ("torch", "numpy", "scipy", "flwr", "dp-accounting", "cryptography")


def doctor(as_json: bool = typer.Option(False, "--json", help="Machine-readable output.")) -> None:
    """Versions, devices, threads, data folders, and what is missing for what."""
    found = examine()
    typer.echo(json.dumps(found, ensure_ascii=False, indent=2) if as_json else "\n".join(_lines(found)))


def examine() -> dict[str, Any]:
    """Plain facts; nothing is changed and nothing is sent."""
    import torch

    from modicum.data.fetch import data_folder

    folder = data_folder(None)
    return {
        "modicum": __version__,
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "devices": [
            f"cpu ({torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()})",
            *(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())),
        ],
        "data": {"folder": str(folder), "datasets": _datasets(folder)},
        "can": {wish: all(find_spec(p) for p in packages) for wish, packages, _ in WISHES},
        "missing": [extra for _, packages, extra in WISHES if not all(find_spec(p) for p in packages)],
        "advice": list(_advice()),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _datasets(folder: Path) -> list[str]:
    """Folders of dataset files that are there."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []


def _advice() -> Iterator[str]:
    import torch

    cores = os.cpu_count() or 1
    if torch.get_num_threads() > cores:
        yield f"torch uses {torch.get_num_threads()} threads on {cores} cores: set OMP_NUM_THREADS={cores}"
    if shutil.disk_usage(Path.cwd()).free < 1 << 30:
        yield "less than 1 GB is free here: runs keep ledgers and models"
    if find_spec("flwr") and not shutil.which("flower-superlink"):
        yield "flower-superlink is not on the PATH: `modicum flower up` finds it beside python"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"modicum {found['modicum']}, Python {found['python']}"
    libraries = [f"{name} {number}" for name, number in found["libraries"].items() if number]
    yield f"libraries  {', '.join(libraries)}"
    yield f"devices    {', '.join(found['devices'])}"
    names = ", ".join(found["data"]["datasets"]) or "nothing yet (`modicum datasets` says where files come from)"
    yield f"data       {found['data']['folder']}: {names}"
    yield ""
    for wish, _, extra in WISHES:
        able = found["can"][wish]
        yield f"{'yes' if able else 'no':<4} {wish}" + ("" if able else f": pip install 'modicum[{extra}]'")
    yield from ("", *found["advice"]) if found["advice"] else ()
