"""Columns as a look reads them: values from 0 to 1 by public ranges, and −1 where a cell is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modicum.data.columns import MISSING, Column, Table, like
from modicum.errors import UserError


@dataclass(frozen=True)
class AskedColumn:
    """What is public of a column: the range of a number or a date, or its categories."""

    name: str
    low: float = 0.0
    high: float = 1.0
    categories: tuple[str, ...] = ()
    dates: tuple[str, str] | None = None

    def place(self, share: float) -> float:
        """A value from 0 to 1 in the column's own units."""
        return self.low + share * (self.high - self.low)


def asked_columns(columns: Mapping[str, Column], of: Sequence[str], bins: int) -> tuple[AskedColumn, ...]:
    """What is looked at: the columns named, or all that have a range, dates or categories."""
    known = {name: column for name, column in columns.items() if _public(column)}
    for name in of:
        if name not in known:
            raise UserError(
                f"column {name!r} has no declared range{like(name, list(columns))}: a look needs public "
                f"constants, e.g. [data.columns] {name} = {{ range = [0, 120] }}, or categories or dates"
            )
    if not known:
        raise UserError("no column has a declared range: give [data.columns] ranges, dates or categories")
    return tuple(_asked(name, known[name], bins) for name in (of or known))


def _public(column: Column) -> bool:
    return not column.drop and (column.range or column.categories or column.dates) is not None


def _asked(name: str, column: Column, bins: int) -> AskedColumn:
    if column.categories is not None:
        if len(column.categories) > bins:
            raise UserError(f"column {name!r} has {len(column.categories)} categories: take as many bins, or more")
        return AskedColumn(name, categories=column.categories)
    if column.dates is not None:
        return AskedColumn(name, dates=column.dates)
    assert column.range is not None
    return AskedColumn(name, *column.range)


def asked_table(
    rows: Sequence[Mapping[str, Any]],
    features: Sequence[str],
    columns: Mapping[str, Column],
    of: Sequence[str],
    bins: int,
    where: str,
) -> Table:
    """One column for each that is asked. A category stands in the middle of its bar; others count as missing."""
    for name in of:
        if name not in features:
            raise UserError(f"{where} has no feature column {name!r}{like(name, features)}: correct its name")
    found = [_read(rows, asked, columns[asked.name], bins, where) for asked in asked_columns(columns, of, bins)]
    return np.concatenate(found, axis=1)


def _read(rows: Sequence[Mapping[str, Any]], asked: AskedColumn, column: Column, bins: int, where: str) -> Table:
    cells = [row[asked.name] for row in rows]
    if asked.categories:
        hot = column.table(asked.name, cells, where)
        share = (hot.argmax(1) + 0.5) / bins
        return np.where(hot.any(1), share, -1.0)[:, None]
    gone = np.array([cell is None or str(cell).strip().lower() in MISSING for cell in cells])
    plain = replace(column, fill=0.0, mean=None, deviation=None)  # what stands in gaps is never looked at
    return np.where(gone[:, None], -1.0, plain.table(asked.name, cells, where))
