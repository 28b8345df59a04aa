"""Bring your own data: a folder of .npz files, PyTorch datasets, Hugging Face datasets; tables are in `tables`.

Each gives a `Dataset` with natural clients, to be passed to `federate`. Values are taken as they are: scale them
by public constants beforehand, since a mean or a maximum of private records is a release that nobody paid for.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from modicum.core.records import leaves
from modicum.data.arrays import Array, Dataset
from modicum.data.assemble import Part, assemble
from modicum.data.labels import as_array
from modicum.data.sequences import Padding, own_tokens, record_of, split_item, stacked
from modicum.data.tables import present
from modicum.errors import UserError

Values = int | Mapping[str, int] | None
TEST = "_test"


def from_npz_folder(
    folder: str | os.PathLike[str],
    *,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    values: Values = None,
    scale: float | None = None,
    id: str | None = None,
    person: str | None = None,
) -> Dataset:
    """One `NAME.npz` per client with arrays `x` and `y`, and optionally `x_test` and `y_test`.

    Args:
        folder: Where the files are. Without an array `x`, all arrays but `y` are a record's, by their names.
        classes: How many there are [default: the largest label + 1].
        labels: Names of the classes, in their order, where labels are text.
        values: How many different whole numbers there are, such as tokens; a table of them for several arrays.
        scale: A public constant that all inputs are divided by, e.g. 255 for images [default: taken as they are].
        id: An array that says who a record is; it is no input.
        person: An array that says whose a record is, for `in_persons`; it is no input.

    Returns:
        A dataset with a client for each file.

    Raises:
        UserError: Where a file cannot be read, or clients' records are not alike.
    """
    paths = sorted(Path(folder).glob("*.npz"))
    if not paths:
        raise UserError(f"no .npz files in {folder}: put one per client there, with arrays x and y")
    loaded = [_read_npz(path, (id, person)) for path in paths]
    known = values_by_name(values, loaded[0][0][0])
    parts, tests = [train for train, _ in loaded], [test for _, test in loaded]
    names = [path.stem for path in paths]
    made = assemble(Path(folder).name, names, parts, tests, classes, labels=labels, values=known, scale=scale)
    if person is None:
        return made
    return replace(made, persons=np.array([key for name in names for key in npz_ids(folder, name, person)]))


def from_torch(
    datasets: Sequence[Any],
    *,
    names: Sequence[str] | None = None,
    test: Any | None = None,
    label: str = "label",
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    values: Values = None,
    length: int | None = None,
    scale: float | None = None,
    name: str = "own",
) -> Dataset:
    """One map-style dataset per client, of PyTorch or Hugging Face, and optionally a common test set.

    Args:
        datasets: One for each client, of (record, label) pairs, of tables with a column of labels, or of records
            alone, whose next tokens are learned. A record is a tensor, or several by name.
        names: Of the clients [default: client-00, client-01, …].
        test: A dataset that everybody is tested on.
        label: The column of labels, where items are tables.
        classes: How many there are, where labels are classes [default: the largest label + 1].
        labels: Names of the classes, in their order, where labels are text.
        values: How many different whole numbers there are, such as tokens; a table of them for several tensors.
        length: The public length that all sequences are brought to: longer ones are cut, shorter ones filled up
            with zeros, and a mask says which positions are real.
        scale: A public constant that all inputs are divided by [default: taken as they are].
        name: Of the dataset.

    Returns:
        A dataset with a client for each of the given ones.

    Raises:
        UserError: Where records or labels are not alike.
    """
    if not isinstance(datasets, Sequence):
        raise UserError(f"from_torch takes a list of datasets, one per client, got {type(datasets).__name__}")
    if not datasets:
        raise UserError("no datasets given: pass one per client")
    clients = list(names) if names is not None else [f"client-{i:02d}" for i in range(len(datasets))]
    if len(clients) != len(datasets):
        raise UserError(f"{len(clients)} names for {len(datasets)} datasets: give one name per client")
    padding = None if length is None else Padding(length)
    parts = [_stack(own, client, label, padding) for own, client in zip(datasets, clients, strict=True)]
    common = None if test is None else _stack(test, "the test set", label, padding)
    known = values_by_name(values, parts[0][0])
    said = labels or _class_names(datasets[0], label)
    return assemble(
        name, clients, parts, [None] * len(parts), classes, common, labels=said, values=known, scale=scale
    )


def values_by_name(values: Values, x: Any) -> dict[str, int]:
    """One number is that of every array of whole numbers."""
    if values is None:
        return {}
    if isinstance(values, Mapping):
        return {str(name): int(most) for name, most in values.items()}
    return {name: values for name, leaf in leaves(x) if leaf.dtype.kind in "iu"}


def npz_ids(folder: str | os.PathLike[str], name: str, id: str) -> list[str]:
    """The ids of one client's records, from an array beside x and y."""
    path = Path(folder) / f"{name}.npz"
    arrays = _load_npz(path)
    if id not in arrays or arrays[id].shape != (len(arrays.get("y", ())),):
        raise UserError(f"{path} needs an array {id!r} with one id per record, it has {', '.join(arrays)}")
    return present(path, id, [str(value) for value in arrays[id].tolist()])


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return {key: content[key] for key in content.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read as .npz ({error}): save it with numpy.savez(path, x=…, y=…)"
        ) from None


def _read_npz(path: Path, keys: Sequence[str | None]) -> tuple[Part, Part | None]:
    arrays = _load_npz(path)
    names = ["x"] if "x" in arrays else [n for n in arrays if n not in ("y", *keys) and not n.endswith(TEST)]
    if not names or "y" not in arrays:
        raise UserError(f"{path} needs arrays x and y, it has {', '.join(arrays) or 'none'}")

    def part(end: str) -> Part:
        found = {name: arrays[name + end] for name in names}
        return (found["x"] if names == ["x"] else found), arrays[f"y{end}"]

    tested = {f"{name}{TEST}" for name in (*names, "y")} <= arrays.keys()
    return part(""), part(TEST) if tested else None


def _stack(dataset: Any, where: str, label: str, padding: Padding | None) -> Part:
    if hasattr(dataset, "to_numpy"):
        raise UserError(f"{where} is a {type(dataset).__name__}: give it, with a column of clients, to from_frame")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"{where} is a {type(dataset).__name__}, and records are read by their numbers: give a map-style "
            "dataset, of a DataLoader its loader.dataset, of an iterable one list(dataset)"
        )
    pairs = [split_item(dataset[i], label) for i in range(len(dataset))]
    if not pairs:
        raise UserError(f"{where} has no records: leave it out")
    x = stacked([record_of(record, padding) for record, _ in pairs], where)
    if all(y is None for _, y in pairs):
        return x, own_tokens(x)
    if any(isinstance(y, str) for _, y in pairs):
        return x, as_array([y for _, y in pairs])
    y = stacked([np.asarray(y) for _, y in pairs], f"{where}, labels")
    return x, y


def _class_names(dataset: Any, label: str) -> tuple[str, ...] | None:
    """As a Hugging Face dataset declares them, which is public."""
    try:
        return tuple(str(name) for name in dataset.features[label].names)
    except (AttributeError, KeyError, TypeError):
        return None
