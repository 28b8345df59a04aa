"""`modicum bench`: the measurements behind the tables in `benchmarks/`, whose commands lie there too."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from modicum.errors import UserError

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"  # where the package is a clone's


def find() -> None:
    """Make `modicum_bench` importable, or say where it is."""
    if not (BENCHMARKS / "modicum_bench").is_dir():
        raise UserError(
            "the benchmarks are in the source repository: clone it and run pip install -e '.[all]', then this "
            "command again"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))


class _Found(TyperGroup):
    """The commands of `modicum_bench.commands`, looked for when one of them is asked for."""

    @property
    def commands(self) -> Any:
        find()
        from modicum_bench.commands import app as found

        found_group: Any = typer.main.get_command(found)
        return found_group.commands

    @commands.setter
    def commands(self, _: Any) -> None:
        """None of its own."""


app = typer.Typer(cls=_Found, help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure this machine."""


def writable(folder: Path) -> Path:
    """A folder that is there or can be made; said before hours of work, and nothing is made yet."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise UserError(f"cannot write to {folder}: choose another folder")
    return folder
