"""Records of one person brought together: each person is one example with a public number of rows (R18).

Which rows are kept goes by their order alone, so that no value decides over what enters training. Keys of persons
stay where the records are: nothing that is made here holds one.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from modicum.core.persons import Join, Slot
from modicum.core.records import each
from modicum.data.arrays import Array, Arrays, Dataset
from modicum.errors import UserError


def in_persons(dataset: Dataset, rows: int, join: Join = "mean") -> Dataset:
    """The dataset with a person, not a record, as the unit of privacy.

    Args:
        dataset: Read with `person=…`, the column or array that says whose each record is.
        rows: That a person has at most, a public number. Further rows of a person are left out, the first in the
            table stay; missing ones count for nothing.
        join: A person's loss is the mean of its rows' losses, or their sum; its gradient is clipped once.

    Returns:
        A dataset whose records are persons. Test records come without keys, and are persons of one row each.

    Raises:
        UserError: Where nothing says whose records are whose, or somebody has records at two clients.
    """
    from modicum.privacy.lifetime.spending import plain_id  # accounting takes a second to import

    slot = Slot(rows, join)
    if dataset.slot is not None:
        raise UserError("the records are persons already: bring them together once")
    if dataset.persons is None:
        raise UserError(
            'nothing says whose records are whose: name the column of persons, e.g. person = "patient_id" under '
            "[data]"
        )
    if dataset.train.y.ndim > 2:
        raise UserError("a row of a person has one label or one row of labels, and these have more dimensions")
    keys = np.array([plain_id(str(key)) for key in dataset.persons.tolist()])
    _, first, person = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)  # persons in the order of their first records
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    owners = dataset.clients
    if owners is not None:
        _refuse_shared(owners, first[person], dataset.client_names)
        owners = owners[first[order]]
    return replace(
        dataset,
        train=grouped(dataset.train, number[person.reshape(-1)], slot),
        test=grouped(dataset.test, np.arange(len(dataset.test)), slot),
        clients=owners,
        persons=dataset.persons[first[order]],
        slot=slot,
    )


def single_rows(dataset: Dataset, slot: Slot) -> Dataset:
    """Other records, public ones, in the same shape: each is a person of one row."""
    train = grouped(dataset.train, np.arange(len(dataset.train)), slot)
    return replace(dataset, train=train, test=Arrays.empty(train), test_clients=None, slot=slot)


def grouped(rows: Arrays, person: npt.NDArray[np.int64], slot: Slot) -> Arrays:
    """Rows by person, numbered from 0: the first of each in `slot.rows` places, zeros where there is none."""
    place = _places(person)
    kept = place < slot.rows
    where, count = (person[kept], place[kept]), int(person.max()) + 1 if len(person) else 0

    def laid(leaf: Array) -> Array:
        out = np.zeros((count, slot.rows, *leaf.shape[1:]), leaf.dtype)
        out[where] = leaf[kept]
        return out

    labels = rows.y.reshape(len(rows), math.prod(rows.y.shape[1:]))
    there = np.ones((len(rows), 1), labels.dtype)
    return Arrays(each(laid, rows.x), laid(np.concatenate([there, labels], axis=1)))


def present_rows(persons: Arrays, shape: tuple[int, ...]) -> Arrays:
    """The rows that are there, one after another, with labels of this shape."""
    there = persons.y[..., 0] > 0.5
    return Arrays(each(lambda leaf: leaf[there], persons.x), persons.y[..., 1:][there].reshape(-1, *shape))


def _places(person: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The how-manieth of its person each row is, from 0, in the order of the table."""
    order = np.argsort(person, kind="stable")
    ordered = person[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, int)
    places = np.empty(len(person), np.int64)
    places[order] = np.arange(len(person)) - np.repeat(starts, np.diff(np.r_[starts, len(person)]))
    return places


def _refuse_shared(owners: Array, first: Array, names: tuple[str, ...]) -> None:
    """Somebody at two clients has two slots, and is hidden by neither client's ε alone."""
    elsewhere = np.flatnonzero(owners != owners[first])
    if len(elsewhere):
        row = int(elsewhere[0])
        pair = sorted((int(owners[row]), int(owners[first[row]])))
        one, other = (names[i] if i < len(names) else f"client {i}" for i in pair)
        raise UserError(
            f"a person has records at {one} and at {other}, and is hidden by neither client's ε alone: move all "
            "records of a person to one client, or, where clients number their persons each from 1, put the "
            "client's name before the number"
        )
