"""How columns of a table become numbers, found in public records of the same kind.

    python -m modicum.public.columns --csv public.csv --label income > columns.toml

A linear head on raw numbers sees straight lines only. Between public quantiles each stretch of a number gets a
column of its own, and each common category one: whatever bends there is learned at the same noise. Only public
records are looked at; a private record is then read by these constants alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from modicum.data.columns import MISSING, Column
from modicum.errors import UserError

STRETCHES = 8  # of a number, of about as many public records each
LEAST = 10  # public records of a category: of rarer ones nothing is learned
FEW = 12  # different whole numbers, up to which they are codes


def columns_of(
    rows: Sequence[Mapping[str, str]], names: Sequence[str], stretches: int = STRETCHES, least: int = LEAST
) -> dict[str, Column]:
    """Edges and categories of these public rows.

    Args:
        rows: Public records, cell by name.
        names: The columns to be described.
        stretches: Of a number: so many parts of about as many records.
        least: Records that a category needs for a column of its own.

    Returns:
        How each column is read; one that tells nothing apart is dropped.

    Raises:
        UserError: Where there are no rows.
    """
    if not rows:
        raise UserError("columns are found in public records, and there are none")
    return {name: _column([str(row[name]).strip() for row in rows], stretches, least) for name in names}


def _column(cells: list[str], stretches: int, least: int) -> Column:
    present = [cell for cell in cells if cell.lower() not in MISSING]
    try:
        numbers = np.array([float(cell) for cell in present])
    except ValueError:
        return _categories(cells, least)
    if len({*present}) <= FEW and np.array_equal(numbers, numbers.round()):
        return _categories(cells, least)
    fill = float(np.median(numbers)) if len(present) < len(cells) else None
    edges = _edges(numbers, stretches)
    return Column(edges=edges, fill=fill) if len(edges) > 1 else Column(drop=True)


def _edges(numbers: np.ndarray, stretches: int) -> tuple[float, ...]:
    """Quantiles; where one value is most of all, those of the others beside it."""
    values, counts = np.unique(numbers, return_counts=True)
    common = values[counts > len(numbers) / stretches]
    others = numbers[~np.isin(numbers, common)]
    shares = np.linspace(0, 1, stretches + 1)
    found = np.concatenate([common, np.quantile(others, shares) if len(others) else []])
    return tuple(float(f"{edge:.6g}") for edge in np.unique([float(f"{edge:.6g}") for edge in found]))


def _categories(cells: list[str], least: int) -> Column:
    kinds = tuple(sorted(kind for kind, count in Counter(cells).items() if count >= least))
    return Column(categories=kinds) if len(kinds) > 1 else Column(drop=True)


def as_toml(columns: Mapping[str, Column]) -> str:
    """The table [data.columns] of an experiment file."""
    lines = ["[data.columns]"]
    for name, column in columns.items():
        given = {key: getattr(column, key) for key in ("edges", "categories", "fill", "drop")}
        said = {key: value for key, value in given.items() if value not in (None, False)}
        inner = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in said.items())
        lines.append(f"{json.dumps(name, ensure_ascii=False)} = {{ {inner} }}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command line: a table of public records to lines of an experiment file."""
    parser = argparse.ArgumentParser(prog="python -m modicum.public.columns", description="Columns as numbers.")
    parser.add_argument("--csv", required=True, help="public records, with a first line of names")
    parser.add_argument("--label", nargs="*", default=["label"], help="columns that are no features")
    parser.add_argument("--stretches", type=int, default=STRETCHES)
    parser.add_argument("--least", type=int, default=LEAST)
    given = parser.parse_args(arguments)
    try:
        with Path(given.csv).open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        names = [name for name in rows[0] if name not in given.label] if rows else []
        print(as_toml(columns_of(rows, names, given.stretches, given.least)), end="")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
