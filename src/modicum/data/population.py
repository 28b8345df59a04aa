"""A million clients of whom a run asks some thousands: who is asked is public, and nobody else is ever opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from modicum.data.arrays import Array, Arrays, ClientData, FederatedData
from modicum.errors import UserError

Open = Callable[[int], tuple[Any, Any]]
"""The records of the client of this number: inputs and targets."""


def drawn(count: int, places: int, seed: int) -> tuple[int, ...]:
    """Numbers of the clients who have a place in the run, ascending: all, where there are places enough.

    A function of public numbers alone, like every public cohort (R5): it amplifies nothing and costs nothing.
    """
    if places >= count:
        return tuple(range(count))
    rng = np.random.Generator(np.random.Philox(key=[seed, count]))
    return tuple(sorted(int(i) for i in rng.choice(count, places, replace=False)))


def from_population(
    count: int,
    open: Open,
    *,
    classes: int,
    rounds: int,
    per_round: int,
    test: tuple[Array, Array],
    seed: int = 0,
    name: str = "population",
) -> FederatedData:
    """Clients of whom only those are opened who have a place in one of the rounds.

    Where there are more clients than places, each of the drawn takes part once. Of the others nothing is read,
    reserved, planned or released, so accounts, ledger, certificate and `verify` grow with who takes part.

    Args:
        count: How many clients there are.
        open: Gives the records (x, y) of the client of a number; called once for each who is drawn.
        classes: How many classes the labels have; 0 where they are no classes.
        rounds: Of the run, as `mo.train` gets them.
        per_round: Clients a round, as `mo.Cohorts` gets them.
        test: Records (x, y) that a simulation is judged by.
        seed: Of the public draw.
        name: Of the dataset, in reports.

    Returns:
        The federation's data, for `mo.Federation(data, budgets)` or `mo.train(data, budgets=…)`.

    Raises:
        UserError: Where a round asks for more clients than there are.
    """
    if not 1 <= per_round <= count:
        raise UserError(f"clients per round must lie between 1 and {count}, got {per_round}")
    if rounds < 1:
        raise UserError(f"rounds must be at least 1, got {rounds}")
    nothing = Arrays(test[0][:0], test[1][:0])
    numbers, digits = drawn(count, rounds * per_round, seed), len(str(count - 1))
    clients = tuple(ClientData(f"client-{i:0{digits}d}", Arrays(*open(i)), nothing, nothing) for i in numbers)
    note = f"{len(numbers):,} of {count:,} clients, drawn publicly by seed {seed}; the others are never asked"
    return FederatedData(name, clients, Arrays(*test), classes, nothing, nothing, 0, note)
