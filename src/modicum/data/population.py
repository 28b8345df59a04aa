"""A million clients of whom a run asks some thousands; nobody else is ever opened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modicum.data.arrays import Array, Arrays, ClientData, FederatedData, Open, Population
from modicum.errors import UserError


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
    rounds: int | None = None,
    per_round: int | None = None,
    test: tuple[Array, Array],
    seed: int = 0,
    name: str = "population",
) -> FederatedData:
    """Clients of whom only those are opened who have a place in one of the rounds.

    Where there are more clients than places, each of the drawn takes part once. Of the others nothing is read,
    reserved, planned or released, so accounts, ledger, certificate and `verify` grow with who takes part.

    Without `rounds` and `per_round` it is a trusted server's secret coins (`rate` of a method) that ask: every
    client is charged in every round, drawn or not, and all of them by one plan.

    Args:
        count: How many clients there are.
        open: Gives the records (x, y) of the client of a number; called for each who is drawn.
        classes: How many classes the labels have; 0 where they are no classes.
        rounds: Of the run, as `mo.train` gets them; with `per_round`, for public cohorts.
        per_round: Clients a round, as `mo.Cohorts` gets them.
        test: Records (x, y) that a simulation is judged by.
        seed: Of the public draw.
        name: Of the dataset, in reports.

    Returns:
        The federation's data, for `mo.Federation(data, budgets)` or `mo.train(data, budgets=…)`.

    Raises:
        UserError: Where a round asks for more clients than there are.
    """
    nothing = Arrays(test[0][:0], test[1][:0])
    if rounds is None and per_round is None:
        return _secret(Population(count, open, nothing), classes, Arrays(*test), name)
    if rounds is None or per_round is None:
        raise UserError("public cohorts need rounds and per_round, secret ones neither of them")
    if not 1 <= per_round <= count:
        raise UserError(f"clients per round must lie between 1 and {count}, got {per_round}")
    if rounds < 1:
        raise UserError(f"rounds must be at least 1, got {rounds}")
    numbers, digits = drawn(count, rounds * per_round, seed), len(str(count - 1))
    clients = tuple(ClientData(f"client-{i:0{digits}d}", Arrays(*open(i)), nothing, nothing) for i in numbers)
    note = f"{len(numbers):,} of {count:,} clients, drawn publicly by seed {seed}; the others are never asked"
    return FederatedData(name, clients, Arrays(*test), classes, nothing, nothing, 0, note)


def _secret(population: Population, classes: int, test: Arrays, name: str) -> FederatedData:
    """One made-up record, which nobody has and nothing is trained on, stands where clients have theirs."""
    if population.count < 1:
        raise UserError(f"a population has at least one client, got {population.count}")
    nothing = population.like
    x, y = (
        np.zeros((1, *nothing.x.shape[1:]), nothing.x.dtype),
        np.zeros((1, *nothing.y.shape[1:]), nothing.y.dtype),
    )
    everybody = ClientData(population.everybody, Arrays(x, y), nothing, nothing)
    note = f"{population.count:,} clients, of whom a secret coin opens some in each round"
    made = FederatedData(name, (everybody,), test, classes, nothing, nothing, 0, note)
    return replace(made, population=population)
