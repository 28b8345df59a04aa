"""Which client grants which ε."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from modicum.data.partition import apportion
from modicum.errors import UserError

Numbers = float | Sequence[float] | Mapping[float, float]
Budgets = Numbers | str
"""One ε for all; a list, dealt in turn; a mapping from ε to the share of clients that grant it; or one as text."""


def assign_budgets(budgets: Budgets, clients: int, seed: int = 0) -> tuple[float, ...]:
    """The ε of each client; `inf` claims no privacy.

    Args:
        budgets: A number: the same for everyone. A list: one a client or, when shorter, dealt in turn (3 values,
            20 clients: 7, 7 and 6). A mapping {ε: weight}: exact counts nearest to the weights, dealt to clients
            at random.
        clients: How many.
        seed: Of what is dealt at random.

    Returns:
        One ε a client, in their order.

    Raises:
        UserError: Where a budget is not positive, or there are more of them than clients.
    """
    given = parse_budgets(budgets) if isinstance(budgets, str) else budgets
    if isinstance(given, int | float):
        return (_checked(given),) * clients
    values = tuple(_checked(value) for value in given)
    if not values:
        raise UserError("no budgets given: name at least one ε")
    if isinstance(given, Mapping):
        counts = apportion(clients, np.array(_weights(given)))
        rng = np.random.default_rng([seed, 0xB0D9])
        dealt = rng.permutation(np.repeat(values, counts))
        return tuple(float(value) for value in dealt)
    if len(values) > clients:
        raise UserError(
            f"{len(values)} budgets for {clients} clients: give one per client, or fewer to be dealt in turn"
        )
    return tuple(values[i % len(values)] for i in range(clients))


def parse_budgets(text: str) -> Numbers:
    """`1`, `0.5,1,8` or `0.05:0.6,0.1:0.3,1:0.1` (ε:weight)."""
    parts = [part.strip() for part in text.split(",")]
    try:
        if all(":" in part for part in parts):
            pairs = [part.split(":") for part in parts]
            weights = {float(value): float(weight) for value, weight in pairs}
            if len(weights) == len(parts):
                return weights
        elif len(parts) == 1:
            return float(parts[0])
        else:
            return [float(part) for part in parts]
    except ValueError:
        pass
    raise UserError(f"cannot read the budgets {text!r}: write 1, or 0.5,1,8, or 0.05:0.6,0.1:0.3,1:0.1 (ε:weight)")


def _checked(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not value > 0:
        raise UserError(f"a budget ε must be a positive number (inf for no privacy), got {value}")
    return float(value)


def _weights(budgets: Mapping[float, float]) -> list[float]:
    weights = [float(w) for w in budgets.values()]
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise UserError(f"budget weights must be numbers of at least 0 with a positive sum, got {weights}")
    return weights
