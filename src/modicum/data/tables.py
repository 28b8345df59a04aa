"""Tables of one's own: CSV, Parquet, and data frames of pandas, polars, Arrow or Hugging Face."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from modicum.core.records import each
from modicum.data.arrays import Array, Dataset
from modicum.data.asked import asked_table
from modicum.data.assemble import assemble
from modicum.data.columns import MISSING, Column, as_columns, like, read_columns, values_in
from modicum.data.labels import as_array
from modicum.data.sequences import own_tokens
from modicum.errors import MissingExtraError, UserError

Rows = list[dict[str, Any]]
LONGEST_CELL = 1 << 27  # characters of a text; the reader's own limit is 131,072
Asked = tuple[Sequence[str], int]
"""Columns that a look asks for (none: all that can be) and bars of a histogram."""


def from_csv(
    path: str | os.PathLike[str],
    *,
    client: str = "client",
    label: str | Sequence[str] = "label",
    id: str | None = None,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    columns: Mapping[str, Column | Mapping[str, Any]] | None = None,
    alone: str | None = None,
    asked: Asked | None = None,
    person: str | None = None,
    features: Sequence[str] | None = None,
) -> Dataset:
    """A table with a header: a column of client names, a column of labels (or several), and features.

    Args:
        path: Of the file.
        client: The column that says whose a record is.
        label: The column of labels: classes 0, 1, …, names of classes, or numbers. Several: a row of labels;
            none, `()`: the next token of the one text.
        id: A column that says who a record is; it is no feature.
        classes: How many there are [default: the largest label + 1].
        labels: Names of the classes in their order, where labels are text [default: those found, sorted].
        columns: Public ranges, fills, dates, categories and lengths of texts, e.g. `{"age": {"range": [0, 120]}}`.
        alone: The one client of a table that has no column of clients.
        asked: What a look asks for, where the table is read for one: columns and bars.
        person: A column that says whose a record is, for `in_persons`; it is no feature, and leaves nobody.
        features: The feature columns by name, in the order that a record has them; others are left out [default:
            all that are left, in the table's own order].

    Returns:
        A dataset with natural clients.

    Raises:
        UserError: Where a cell cannot be read, with its row and what to do.
    """
    rows, names = _read_csv(path)
    told = (client, label, id, classes, labels, columns, alone, asked, person, features)
    return from_rows(rows, names, str(path), Path(path).stem, *told)


def from_parquet(path: str | os.PathLike[str], **how: Any) -> Dataset:
    """The same of a Parquet file; everything else is as in `from_csv`.

    Args:
        path: Of the file.
        **how: As in `from_csv`.

    Returns:
        A dataset with natural clients.

    Raises:
        UserError: Where a cell cannot be read, with its row and what to do.
    """
    return from_frame(_read_parquet(path), name=Path(path).stem, **how)


def from_frame(
    frame: Any,
    *,
    client: str = "client",
    label: str | Sequence[str] = "label",
    id: str | None = None,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    columns: Mapping[str, Column | Mapping[str, Any]] | None = None,
    alone: str | None = None,
    asked: Asked | None = None,
    person: str | None = None,
    features: Sequence[str] | None = None,
    name: str = "frame",
) -> Dataset:
    """The same of a data frame of pandas, polars, Arrow or Hugging Face; arguments are those of `from_csv`.

    Args:
        frame: The data frame.
        client, label, id, classes, labels, columns, alone, asked, person, features: As in `from_csv`.
        name: Of the dataset.

    Returns:
        A dataset with natural clients.

    Raises:
        UserError: Where a cell cannot be read, with its row and what to do.
    """
    rows, names = _rows(frame)
    told = (client, label, id, classes, labels, columns, alone, asked, person, features)
    return from_rows(rows, names, name, name, *told)


def from_rows(
    rows: Rows,
    header: Sequence[str],
    where: str,
    name: str,
    client: str,
    label: str | Sequence[str],
    id: str | None,
    classes: int | None,
    labels: Sequence[str] | None,
    given: Mapping[str, Column | Mapping[str, Any]] | None,
    alone: str | None,
    asked: Asked | None = None,
    person: str | None = None,
    named: Sequence[str] | None = None,
) -> Dataset:
    """A dataset of a table's rows; `where` names it in errors."""
    targets, columns = (label,) if isinstance(label, str) else tuple(label), as_columns(given)
    keys = tuple(key for key in (id, person) if key is not None)
    features = features_of(rows, header, where, client=client, targets=targets, keys=keys, alone=alone)
    features = features if named is None else _matched(features, named, where)
    if asked is None:
        x = read_columns(rows, features, columns, where)
    else:
        x = asked_table(rows, features, columns, *asked, where)
    y = [as_array(_filled(rows, column, where)) for column in targets]
    found = own_tokens(x) if not targets else y[0] if isinstance(label, str) else np.stack(y, axis=1)
    owner = np.array([str(row.get(client, alone)) for row in rows])
    names = sorted(set(owner.tolist()))
    parts = [(_rows_of(x, owner == one), found[owner == one]) for one in names]
    values = values_in({} if asked is not None else columns, x)
    made = assemble(name, names, parts, [None] * len(names), classes, labels=labels, values=values)
    if person is None:
        return made
    whose = np.array(present(where, person, [_key(row[person]) for row in rows]))
    return replace(made, persons=np.concatenate([whose[owner == one] for one in names]))


def features_of(
    rows: Rows,
    columns: Sequence[str],
    where: str,
    *,
    client: str,
    targets: Sequence[str],
    keys: Sequence[str] = (),
    alone: str | None = None,
) -> list[str]:
    """The names of a table's features, once it has the other columns. With `alone` it may lack one of clients."""
    needed = (*targets, *keys)
    for column in needed if alone is not None else (client, *needed):
        if column not in columns:
            raise UserError(f"{where} has no column {column!r}{like(column, columns)}: correct its name")
    features = [c for c in columns if c not in (client, *needed)]
    if not rows or not features:
        shown = " and ".join(repr(c) for c in (client, *targets))
        raise UserError(f"{where} needs at least one row and one feature column besides {shown}")
    return features


def _matched(found: Sequence[str], named: Sequence[str], where: str) -> list[str]:
    """The columns of these names, whatever their places in this table."""
    if not named or len(set(named)) < len(named):
        raise UserError(f"feature columns are named once each, at least one, got {list(named)}")
    for name in named:
        if name not in found:
            raise UserError(f"{where} has no feature column {name!r}{like(name, found)}: correct its name")
    return list(named)


def csv_features(
    path: str | os.PathLike[str], *, client: str, label: str, id: str | None = None, alone: str | None = None
) -> tuple[Rows, list[str]]:
    """The rows of a CSV file and the names of its features."""
    rows, header = _read_csv(path)
    keys = () if id is None else (id,)
    return rows, features_of(rows, header, str(path), client=client, targets=(label,), keys=keys, alone=alone)


def csv_ids(path: str | os.PathLike[str], name: str, *, client: str, id: str) -> list[str]:
    """The ids of one client's records; all of them where the table has no column of clients."""
    return _ids(*_read_csv(path), path, name, client, id)


def parquet_ids(path: str | os.PathLike[str], name: str, *, client: str, id: str) -> list[str]:
    """The same of a Parquet file."""
    return _ids(*_rows(_read_parquet(path)), path, name, client, id)


def _ids(rows: Rows, header: Sequence[str], where: object, name: str, client: str, id: str) -> list[str]:
    if id not in header:
        raise UserError(f"{where} has no column {id!r}{like(id, header)}: correct its name")
    return present(where, id, [_key(row[id]) for row in rows if str(row.get(client, name)) == name])


def _key(cell: Any) -> str:
    return "" if cell is None else str(cell)


def present(where: object, id: str, ids: list[str]) -> list[str]:
    """The ids, if every record has one: those without would all be one, or have a second one elsewhere."""
    if not ids or any(value.strip().lower() in MISSING for value in ids):
        raise UserError(f"{where}: every record needs a value under {id!r}: fill it in, or do not name the column")
    return ids


def _read_csv(path: str | os.PathLike[str]) -> tuple[Rows, list[str]]:
    csv.field_size_limit(LONGEST_CELL)
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as f:  # spreadsheets write a byte-order mark
            reader = csv.DictReader(f)
            rows, names = list(reader), list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path} as a CSV file: {error}") from None
    _check_form(rows, names, path)
    return rows, names


def _check_form(rows: Rows, names: Sequence[str], path: object) -> None:
    """What csv reads without a word, and loses: a second column of one name, cells beyond the header's."""
    if len(names) == 1 and (mark := next((m for m in ";\t|" if m in names[0]), "")):
        raise UserError(f"{path} has {mark!r} between its cells: save it with commas")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise UserError(f"{path} has two columns of one name ({names.index(twice) + 1} is the first): rename one")
    long = next((i for i, row in enumerate(rows) if None in row), None)
    if long is not None:
        raise UserError(
            f"{path}, row {long + 2} has more cells than the header's {len(names)}: cells with commas need quotes"
        )


def _read_parquet(path: str | os.PathLike[str]) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "tables", "reading a Parquet file") from None
    try:
        return parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise UserError(f"cannot read {path} as a Parquet file: {str(error).splitlines()[0]}") from None


def _rows(frame: Any) -> tuple[Rows, list[str]]:
    """Of whatever gives names of columns and a list for each."""
    if hasattr(frame, "collect"):
        raise UserError(f"{type(frame).__name__} has no rows yet: give frame.collect()")
    names = getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None:
        raise UserError(f"a table has columns, got {type(frame).__name__}: give a data frame, or use from_torch")
    columns = {str(name): _cells(frame[name]) for name in names}
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    return rows, list(columns)


def _cells(column: Any) -> list[Any]:
    for way in ("to_pylist", "to_list", "tolist"):
        if hasattr(column, way):
            return [None if _gone(cell) else cell for cell in getattr(column, way)()]
    return list(column)


def _gone(cell: Any) -> bool:
    try:
        return bool(cell != cell)
    except TypeError:  # pandas.NA is neither the same as itself nor another
        return True


def _filled(rows: Rows, column: str, where: str) -> list[Any]:
    for i, row in enumerate(rows):
        if row[column] is None or not str(row[column]).strip():
            raise UserError(f"{where}, row {i + 2}, column {column!r}: the label is missing; leave the row out")
    return [row[column] for row in rows]


def _rows_of(x: Any, keep: Array) -> Any:
    return each(lambda leaf: leaf[keep], x)
