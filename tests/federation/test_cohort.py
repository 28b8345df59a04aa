"""A public schedule: who takes part when, and how much work it is to know."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from modicum.federation import cohort as cohort_module
from modicum.federation.cohort import Balanced, rounds_of

SIZES = [(1, 3, 1), (7, 5, 3), (7, 9, 7), (10, 12, 4), (23, 6, 22)]  # clients, rounds, a round


def quadratic(clients: int, rounds: int, per_round: int, seed: int) -> list[tuple[int, ...]]:
    """The same schedule by a reference that asks everybody about everybody."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    waiting: list[int] = []
    table = []
    for _ in range(rounds):
        cohort, waiting = waiting[:per_round], waiting[per_round:]
        if len(cohort) < per_round:
            order = [int(i) for i in rng.permutation(clients)]
            fresh = [i for i in order if i not in cohort_module.set(cohort)]  # type: ignore[attr-defined]
            taken = fresh[: per_round - len(cohort)]
            waiting = [i for i in order if i not in cohort_module.set(taken)]  # type: ignore[attr-defined]
            cohort = cohort + taken
        table.append(tuple(sorted(cohort)))
    return table


class Counted:
    """`set`, with a count of the elements that were put into one."""

    def __init__(self) -> None:
        self.elements = 0

    def __call__(self, values: Iterable[int] = ()) -> set[int]:
        found = set(values)
        self.elements += len(found)
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    count = Counted()
    monkeypatch.setattr(cohort_module, "set", count, raising=False)
    return count


@pytest.mark.parametrize(("clients", "rounds", "per_round"), SIZES)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_schedule_is_the_reference_s(
    clients: int, rounds: int, per_round: int, seed: int, counted: Counted
) -> None:
    schedule = Balanced(clients, rounds, per_round, seed)
    table = quadratic(clients, rounds, per_round, seed)
    assert [schedule.invited(t) for t in range(rounds)] == table
    for client in range(clients):
        assert rounds_of(schedule, client, rounds) == tuple(t for t in range(rounds) if client in table[t])
        assert schedule.participations(client) == sum(client in cohort for cohort in table)
    assert counted.elements > 0


@pytest.mark.parametrize("per_round", [300, 400, 600])
def test_its_work_grows_with_its_size_and_not_with_the_square(per_round: int, counted: Counted) -> None:
    clients, rounds = 600, 3
    Balanced(clients, rounds, per_round).invited(0)
    assert counted.elements <= 2 * clients * rounds
    counted.elements = 0
    quadratic(clients, rounds, per_round, 0)
    assert counted.elements > clients * per_round


def test_a_schedule_of_a_hundred_thousand_is_made() -> None:
    """By the square it would be ten thousand million steps."""
    everybody, half = Balanced(100_000, 4, 100_000), Balanced(100_000, 4, 50_000)
    assert everybody.participations(99_999) == 4
    assert half.participations(7) == 2
