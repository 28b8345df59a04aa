"""Other records in the place of a federation's own: same clients, sizes and public data, other content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from modicum.core.records import each
from modicum.data.arrays import Array, Arrays, ClientData
from modicum.federation.experiment import Federation

LOUD = 30.0  # times as large as features usually are

Fill = Callable[[np.random.Generator, Arrays, int], Arrays]


def loud(federation: Federation, seed: int) -> Federation:
    """Random values far outside of what a model meets, with random labels."""
    classes = federation.data.classes

    def fill(rng: np.random.Generator, own: Arrays, client: int) -> Arrays:
        return Arrays(each(lambda leaf: _loud(rng, leaf), own.x), _labels(rng, own, classes, client))

    return _filled(federation, seed, fill)


def blank(federation: Federation, seed: int) -> Federation:
    """Nothing but zeros; every record of a client has the same label."""

    def fill(rng: np.random.Generator, own: Arrays, client: int) -> Arrays:  # noqa: ARG001
        one = np.arange(len(own)) % 2 if len(federation.budgets) == 1 else np.full(len(own), client % 2)
        y = one if own.has_classes else np.zeros_like(own.y)
        return Arrays(each(np.zeros_like, own.x), y)

    return _filled(federation, seed, fill)


def dealt_anew(federation: Federation, seed: int) -> Federation:
    """The federation's own records, as plausible as before, but with other clients and other labels."""
    data = federation.data
    pool = Arrays.concatenate([part for c in data.clients for part in (c.train, c.validation, c.test)])

    def fill(rng: np.random.Generator, own: Arrays, client: int) -> Arrays:
        other = pool.take(rng.integers(0, len(pool), len(own)))
        return Arrays(other.x, _labels(rng, own, data.classes, client) if own.has_classes else other.y)

    return _filled(federation, seed, fill)


GARBAGE: dict[str, Callable[[Federation, int], Federation]] = {
    "loud": loud,
    "blank": blank,
    "dealt anew": dealt_anew,
}


def _loud(rng: np.random.Generator, leaf: Array) -> Array:
    """Whole numbers stay within what the others are: a model has no more tokens."""
    if leaf.dtype == np.uint8:
        return rng.integers(0, 256, leaf.shape).astype(np.uint8)
    if leaf.dtype.kind in "ib":
        most = int(leaf.max()) + 1 if leaf.size else 2
        return rng.integers(0, most, leaf.shape).astype(leaf.dtype)
    return (LOUD * rng.normal(size=leaf.shape)).astype(leaf.dtype)


def _labels(rng: np.random.Generator, own: Arrays, classes: int, client: int) -> Array:
    """Never one label alone, be it that clients have a record each: that is refused as nothing to learn."""
    if not own.has_classes:
        return _loud(rng, own.y) if own.y.dtype.kind == "f" else rng.permuted(own.y, axis=0)
    y = rng.integers(0, classes, len(own))
    y[:2] = (np.arange(2) + client)[: len(own)] % 2
    return y


def _filled(federation: Federation, seed: int, fill: Fill) -> Federation:
    rng, data = np.random.default_rng(seed), federation.data

    def other(client: ClientData, i: int) -> ClientData:
        train, validation, test = (fill(rng, own, i) for own in (client.train, client.validation, client.test))
        return replace(client, train=train, validation=validation, test=test)

    clients = tuple(other(client, i) for i, client in enumerate(data.clients))
    test = fill(rng, data.test, 0)
    return Federation(replace(data, clients=clients, test=test), federation.budgets)
