"""Clients' parts joined into one dataset, remembering whose each row is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modicum.core.records import each
from modicum.data.arrays import Array, Arrays, Dataset, Peek, largest_values
from modicum.data.check import check_arrays
from modicum.data.labels import is_text, names_among, numbered
from modicum.errors import UserError

Part = tuple[Any, Array]
"""Records and labels of one client, as they were read."""


def assemble(
    name: str,
    names: Sequence[str],
    parts: Sequence[Part],
    tests: Sequence[Part | None],
    classes: int | None,
    common: Part | None = None,
    *,
    labels: Sequence[str] | None = None,
    values: Mapping[str, int] | None = None,
    scale: float | None = None,
) -> Dataset:
    """One dataset of all clients.

    Args:
        name: Of the dataset.
        names: Of the clients.
        parts: What each trains on.
        tests: What each is tested on, where it has some.
        classes: How many there are; None: as many as were found.
        common: What everybody is tested on.
        labels: Names of classes, where labels are text; None: those that were found.
        values: How many different whole numbers an array may hold; what is not named is found.
        scale: A public constant that inputs are divided by.

    Returns:
        The dataset, which knows what was taken from its own records.

    Raises:
        UserError: Where clients' records are not alike.
    """
    empty = [client for client, part in zip(names, parts, strict=True) if not len(part[1])]
    if empty:
        raise UserError(f"client {empty[0]!r} has no records: leave it out")
    given = [part for part in (*parts, *tests, common) if part is not None and len(part[1])]
    text = [y for _, y in given if is_text(y)]
    if text and len(text) < len(given):
        raise UserError("some labels are text and others numbers: make them alike")
    called = tuple(labels or names_among(text)) if text else tuple(labels or ())

    def arrays(part: Part | None, where: str) -> Arrays | None:
        if part is None:
            return None
        x, y = part
        y = numbered(y, called, where) if text else y
        try:
            return Arrays(each(lambda leaf: _as_it_is(leaf, scale), x), y)
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: {error}") from None

    own = [arrays(part, client) for part, client in zip(parts, names, strict=True)]
    held = [arrays(part, f"{client} (test)") for part, client in zip(tests, names, strict=True)]
    return _joined(name, names, own, held, arrays(common, "the test set"), classes, called, labels, values or {})


def _joined(
    name: str,
    names: Sequence[str],
    own: Sequence[Any],
    held: Sequence[Any],
    common: Arrays | None,
    classes: int | None,
    called: tuple[str, ...],
    labels: Sequence[str] | None,
    values: Mapping[str, int],
) -> Dataset:
    present = [part for part in (*own, *held, common) if part is not None and len(part)]
    counted = all(part.has_classes for part in present)
    peeks = [Peek.CLASSES] if classes is None and labels is None and counted else []
    if counted and called:
        classes = len(called)
    elif classes is None:
        classes = max(int(part.y.max()) for part in present) + 1 if counted else 0
    found = largest_values(present)
    _check_values(found, values)
    if set(found) - set(values):
        peeks.append(Peek.VALUES)
    for client, part, test in zip(names, own, held, strict=True):
        check_arrays(part, classes, own[0].shape, f"client {client!r}")
        if test is not None:
            check_arrays(test, classes, own[0].shape, f"client {client!r} (test)")
    owners = np.repeat(np.arange(len(own)), [len(part) for part in own])
    tested = [part for part in held if part is not None]
    test_owners = np.repeat(np.arange(len(own)), [0 if part is None else len(part) for part in held])
    train = Arrays.concatenate(own)
    test = common if common is not None else Arrays.concatenate(tested) if tested else Arrays.empty(train)
    whose = test_owners if tested and common is None else None
    return Dataset(
        name,
        train,
        test,
        classes,
        owners,
        whose,
        tuple(names),
        peeks=tuple(peeks),
        values={**found, **values},
        labels=called,
    )


def _check_values(found: Mapping[str, int], values: Mapping[str, int]) -> None:
    for array, most in values.items():
        if found.get(array, 1) > most:
            which = f" of {array}" if array else ""
            raise UserError(
                f"the whole numbers{which} reach {found[array] - 1}, and values = {most} allows 0 to {most - 1}"
            )


def _as_it_is(leaf: Array, scale: float | None) -> Array:
    """Values as they are, or divided by a public constant that somebody asked for. Bytes need not be pixels."""
    if scale is None:
        return leaf.astype(np.int64) if leaf.dtype == np.uint8 else leaf
    if leaf.dtype == np.uint8 and scale == 255:
        return leaf  # kept small: `Arrays` divides it
    return (leaf / scale).astype(np.float32)
