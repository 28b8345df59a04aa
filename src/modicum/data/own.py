"""Bring your own data: a folder of .npz files, a CSV file with a client column, or PyTorch datasets.

Each gives a `Dataset` with natural clients, to be passed to `federate`. Values are taken as they are: scale them
by public constants beforehand, since a mean or a maximum of private records is a release that nobody paid for.
"""

from __future__ import annotations

import csv
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modicum.core.records import each
from modicum.data.arrays import Array, Arrays, Dataset, Peek
from modicum.data.check import check_arrays
from modicum.data.columns import Column, read_columns
from modicum.errors import UserError


def from_npz_folder(
    folder: str | os.PathLike[str], *, classes: int | None = None, scale: float | None = None
) -> Dataset:
    """One `NAME.npz` per client with arrays `x` and `y`, and optionally `x_test` and `y_test`.

    Args:
        folder: Where the files are.
        classes: How many there are [default: the largest label + 1].
        scale: A public constant that all inputs are divided by, e.g. 255 for images [default: taken as they are].

    Returns:
        A dataset with a client for each file.

    Raises:
        UserError: Where a file cannot be read, or clients' records are not alike.
    """
    paths = sorted(Path(folder).glob("*.npz"))
    if not paths:
        raise UserError(f"no .npz files in {folder}: put one per client there, with arrays x and y")
    loaded = [_read_npz(path, scale) for path in paths]
    tests = [test for _, test in loaded]
    return _assemble(Path(folder).name, [p.stem for p in paths], [train for train, _ in loaded], tests, classes)


def from_csv(
    path: str | os.PathLike[str],
    *,
    client: str = "client",
    label: str = "label",
    id: str | None = None,
    classes: int | None = None,
    columns: Mapping[str, Column] | None = None,
    alone: str | None = None,
) -> Dataset:
    """A table with a header: a column of client names, a column of labels 0, 1, …, and numeric features.

    A column of ids says who a record is. It is no feature. `columns` gives features public ranges, fills and
    categories. `alone` names the one client of a table that has no column of clients.
    """
    rows, features = csv_features(path, client=client, label=label, id=id, alone=alone)
    x, y = read_columns(rows, features, columns or {}, str(path)), _labels(path, rows, label)
    owner = np.array([row.get(client, alone) for row in rows])
    names = sorted(set(owner.tolist()))
    parts = [Arrays(x[owner == name], y[owner == name]) for name in names]
    return _assemble(Path(path).stem, names, parts, [None] * len(names), classes)


def csv_features(
    path: str | os.PathLike[str], *, client: str, label: str, id: str | None = None, alone: str | None = None
) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a table and the names of its features. With `alone` it may lack a column of clients."""
    needed = (label,) if id is None else (label, id)
    rows, columns = _read_csv(path, needed if alone is not None else (client, *needed))
    features = [c for c in columns if c not in (client, *needed)]
    if not rows or not features:
        raise UserError(f"{path} needs at least one row and one feature column besides {client!r} and {label!r}")
    return rows, features


def csv_ids(path: str | os.PathLike[str], name: str, *, client: str, id: str) -> list[str]:
    """The ids of one client's records; all of them where the table has no column of clients."""
    rows, _ = _read_csv(path, (id,))
    return _present(path, id, [row[id] or "" for row in rows if row.get(client, name) == name])


def npz_ids(folder: str | os.PathLike[str], name: str, id: str) -> list[str]:
    """The ids of one client's records, from an array beside x and y."""
    path = Path(folder) / f"{name}.npz"
    arrays = _load_npz(path)
    if id not in arrays or arrays[id].shape != (len(arrays.get("x", ())),):
        raise UserError(f"{path} needs an array {id!r} with one id per record, it has {', '.join(arrays)}")
    return _present(path, id, [str(value) for value in arrays[id].tolist()])


def _present(where: object, id: str, ids: list[str]) -> list[str]:
    if not ids or not all(value.strip() for value in ids):
        raise UserError(f"{where}: every record needs a value under {id!r}: fill it in, or leave id_column out")
    return ids


def from_torch(
    datasets: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    test: Any | None = None,
    classes: int | None = None,
    scale: float | None = None,
    name: str = "own",
) -> Dataset:
    """One map-style PyTorch `Dataset` of (record, label) pairs per client, and optionally a common test set.

    Args:
        datasets: One for each client. A record is a tensor, or several by name; a label a number or several.
        names: Of the clients [default: client-00, client-01, …].
        test: A dataset that everybody is tested on.
        classes: How many there are, where labels are classes [default: the largest label + 1].
        scale: A public constant that all inputs are divided by [default: taken as they are].
        name: Of the dataset.

    Returns:
        A dataset with a client for each of the given ones.

    Raises:
        UserError: Where records or labels are not alike.
    """
    if not datasets:
        raise UserError("no datasets given: pass one per client")
    labels = list(names) if names is not None else [f"client-{i:02d}" for i in range(len(datasets))]
    if len(labels) != len(datasets):
        raise UserError(f"{len(labels)} names for {len(datasets)} datasets: give one name per client")
    parts = [_stack(dataset, client, scale) for dataset, client in zip(datasets, labels, strict=True)]
    common = None if test is None else _stack(test, "the test set", scale)
    return _assemble(name, labels, parts, [None] * len(parts), classes, common)


def _read_csv(path: str | os.PathLike[str], needed: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """Rows and columns of a table that has the columns needed."""
    try:
        with Path(path).open(
            newline="", encoding="utf-8-sig"
        ) as f:  # spreadsheets like to write a byte-order mark
            reader = csv.DictReader(f)
            rows, columns = list(reader), list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path} as a CSV file: {error}") from None
    for column in needed:
        if column not in columns:
            raise UserError(f"{path} has no column {column!r}: its columns are {', '.join(columns)}")
    return rows, columns


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return {key: content[key] for key in content.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read as .npz ({error}): save it with numpy.savez(path, x=…, y=…)"
        ) from None


def _read_npz(path: Path, scale: float | None) -> tuple[Arrays, Arrays | None]:
    arrays = _load_npz(path)
    if not {"x", "y"} <= arrays.keys():
        raise UserError(f"{path} needs arrays x and y, it has {', '.join(arrays) or 'none'}")
    given = {"x_test", "y_test"} <= arrays.keys()
    test = _arrays(path, arrays["x_test"], arrays["y_test"], scale) if given else None
    return _arrays(path, arrays["x"], arrays["y"], scale), test


def _arrays(where: object, x: Any, y: Array, scale: float | None = None) -> Arrays:
    try:
        return Arrays(each(lambda leaf: _as_it_is(leaf, scale), x), y)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from None


def _as_it_is(leaf: Array, scale: float | None) -> Array:
    """Values as they are, or divided by a public constant that somebody asked for. Bytes need not be pixels."""
    if scale is None:
        return leaf.astype(np.int64) if leaf.dtype == np.uint8 else leaf
    if leaf.dtype == np.uint8 and scale == 255:
        return leaf  # kept small: `Arrays` divides it
    return (leaf / scale).astype(np.float32)


def _labels(path: object, rows: list[dict[str, str]], label: str) -> Array:
    """Classes where all are whole numbers, else numbers."""
    found = Column().table(label, [row[label] for row in rows], str(path))[:, 0]
    return found.astype(np.int64) if np.array_equal(found, np.floor(found)) else found


def _stack(dataset: Any, where: str, scale: float | None) -> Arrays:
    pairs = [dataset[i] for i in range(len(dataset))]
    if not pairs:
        raise UserError(f"{where} has no records: leave it out")
    x = each(lambda *leaf: np.stack([np.asarray(part) for part in leaf]), *(record for record, _ in pairs))
    return _arrays(where, x, np.stack([np.asarray(label) for _, label in pairs]), scale)


def _assemble(
    name: str,
    names: list[str],
    parts: list[Arrays],
    tests: Sequence[Arrays | None],
    classes: int | None,
    common: Arrays | None = None,
) -> Dataset:
    """Join the clients' parts, remembering whose each row is."""
    shape = parts[0].shape
    empty = [client for client, part in zip(names, parts, strict=True) if not len(part)]
    if empty:
        raise UserError(f"client {empty[0]!r} has no records: leave it out")
    present = [part for part in (*parts, *tests, common) if part is not None and len(part)]
    counted = all(part.has_classes for part in present)
    peeks = (Peek.CLASSES,) if classes is None and counted else ()
    if classes is None:
        classes = max(int(part.y.max()) for part in present) + 1 if counted else 0
    for client, part, test in zip(names, parts, tests, strict=True):
        check_arrays(part, classes, shape, f"client {client!r}")
        if test is not None:
            check_arrays(test, classes, shape, f"client {client!r} (test)")
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    held = [test for test in tests if test is not None]
    test_owners = np.repeat(np.arange(len(parts)), [0 if test is None else len(test) for test in tests])
    train = Arrays.concatenate(parts)
    test = common if common is not None else Arrays.concatenate(held) if held else Arrays.empty(train)
    whose = test_owners if held and common is None else None
    return Dataset(name, train, test, classes, owners, whose, tuple(names), peeks=peeks)
