"""What the engine asks before a run: is there anything in the data that cannot be trained on?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from modicum.core.records import leaves
from modicum.data.arrays import Arrays, FederatedData
from modicum.errors import UserError
from modicum.privacy.spec import LARGEST_BUDGET, SMALLEST_BUDGET


def check(data: FederatedData, budgets: Sequence[float] | None = None) -> None:
    """Raise a UserError for the first thing that is wrong with the data or the budgets of the clients."""
    if not data.clients:
        raise UserError("there are no clients: give at least one")
    if len(set(data.names)) != len(data.names):
        raise UserError("two clients have the same name: names must differ")
    for client in data.clients:
        if not len(client.train):
            raise UserError(f"{client.name} has no training records: leave it out, or hold out less for tests")
        for part, arrays in (("training", client.train), ("validation", client.validation), ("test", client.test)):
            check_arrays(arrays, data.classes, data.input_shape, f"{client.name}'s {part} data")
    check_arrays(data.test, data.classes, data.input_shape, "the global test data")
    check_arrays(data.proxy, data.proxy_classes, data.input_shape, "the proxy")
    check_arrays(data.proxy_validation, data.proxy_classes, data.input_shape, "the proxy's validation data")
    # One client alone may well have one class. A silo that stayed away for it would tell that it has no other.
    classes = data.classes and all(c.train.has_classes for c in data.clients)
    if classes and len(data.clients) > 1 and len({int(y) for c in data.clients for y in np.unique(c.train.y)}) < 2:
        raise UserError(
            "all training records have the same label: there is nothing to learn, check the label column"
        )
    if budgets is not None:
        _check_budgets(data, budgets)


def checked(data: FederatedData, name: str) -> Arrays:
    """The records of a population's client, looked at as all others are before a run."""
    assert data.population is not None
    records = data.population.records(name)
    if not len(records):
        raise UserError(f"{name} has no training records: a population's clients have at least one each")
    check_arrays(records, data.classes, data.input_shape, f"{name}'s training data")
    return records


def refuse_population(data: FederatedData, what: str) -> None:
    """For whatever would look at clients' records before, beside or after the rounds."""
    if data.population is not None:
        raise UserError(f"{what} needs all clients' records, and a population is opened one by one: leave it out")


def refuse_peeks(data: FederatedData) -> None:
    """For runs with real noise: nothing that is told was decided by the records that it protects."""
    for peek in data.peeks:
        raise UserError(f"with simulation = false {peek}")


def check_arrays(arrays: Arrays, classes: int, shape: tuple[int, ...], where: str) -> None:
    """Finite values of the right shape, and labels within 0 … classes−1 where they are classes."""
    if not len(arrays):
        return
    if arrays.shape != shape:
        raise UserError(
            f"{where} has records of shape {arrays.shape}, other clients have {shape}: make them alike"
        )
    for name, leaf in (*leaves(arrays.x), ("the labels", arrays.y)):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            row = int(np.flatnonzero(~np.isfinite(leaf).reshape(len(arrays), -1).all(axis=1))[0])
            which = f" of {name}" if name else ""
            raise UserError(
                f"{where} has NaN or Inf in record {row}{which}: fill in or remove missing values beforehand"
            )
    if not classes or not arrays.has_classes:
        return
    if arrays.y.min() < 0 or arrays.y.max() >= classes:
        bad = arrays.y.min() if arrays.y.min() < 0 else arrays.y.max()
        raise UserError(f"{where} has the label {bad}, outside 0–{classes - 1}: number the classes from 0")


def _check_budgets(data: FederatedData, budgets: Sequence[float]) -> None:
    if len(budgets) != len(data.clients):
        raise UserError(f"{len(budgets)} budgets for {len(data.clients)} clients: give one ε per client")
    for name, budget in zip(data.names, budgets, strict=True):
        if not budget > 0:
            raise UserError(f"{name}: the budget ε must be positive (inf for no privacy), got {budget}")
        if not (SMALLEST_BUDGET <= budget <= LARGEST_BUDGET or math.isinf(budget)):
            raise UserError(
                f"{name}: the budget ε lies between {SMALLEST_BUDGET:g} and {LARGEST_BUDGET:g} "
                f"(inf for no privacy), got {budget:g}"
            )
