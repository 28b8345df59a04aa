"""Who is invited to each round, and how often each client takes part at most."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from modicum.core.release_gate import SERVER
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.privacy.noise import NoiseKey, NoiseSource


class Cohorts(Protocol):
    """A rule for choosing cohorts, for `clients` clients and `rounds` rounds."""

    @property
    def size(self) -> float:
        """The fixed public denominator: the (expected) number of clients a round."""

    def participations(self, client: int) -> int:
        """In how many rounds a client takes part at most: what its noise is calibrated for (R5)."""

    def invited(self, round: int) -> tuple[int, ...]:
        """Numbers of the clients that this round's cohort has, ascending."""


@dataclass(frozen=True)
class Balanced:
    """A public schedule made beforehand: each client in ⌊T·m/N⌋ or ⌈T·m/N⌉ rounds (R5)."""

    clients: int
    rounds: int
    per_round: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_size(self.per_round, self.clients)

    @cached_property
    def _table(self) -> tuple[tuple[int, ...], ...]:
        if self.per_round == self.clients:
            return (tuple(range(self.clients)),) * self.rounds
        rng = np.random.Generator(np.random.Philox(key=self.seed))
        waiting: list[int] = []
        table = []
        for _ in range(self.rounds):
            cohort = waiting[: self.per_round]
            waiting = waiting[self.per_round :]
            if len(cohort) < self.per_round:  # a new pass; nobody twice in one round
                order = [int(i) for i in rng.permutation(self.clients)]
                already = set(cohort)
                fresh = [i for i in order if i not in already]
                taken = fresh[: self.per_round - len(cohort)]
                gone = set(taken)
                waiting = [i for i in order if i not in gone]
                cohort = cohort + taken
            table.append(tuple(sorted(cohort)))
        return tuple(table)

    @property
    def size(self) -> float:
        return float(self.per_round)

    def invited(self, round: int) -> tuple[int, ...]:
        return self._table[round]

    def rounds_of(self, client: int) -> tuple[int, ...]:
        """Rounds in which a client is invited."""
        return tuple(t for t, cohort in enumerate(self._table) if _holds(cohort, client))

    def participations(self, client: int) -> int:
        return len(self.rounds_of(client))


@dataclass(frozen=True)
class Rotation:
    """A public cycle: everybody in turn, always in the same order: a client's rounds keep a distance (R19)."""

    clients: int
    rounds: int
    per_round: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_size(self.per_round, self.clients)

    @property
    def separation(self) -> int:
        """Rounds from one of a client's turns to the next, at least."""
        return self.clients // self.per_round

    @property
    def most(self) -> int:
        """Rounds that any client is in at most."""
        return -(-self.rounds * self.per_round // self.clients)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        rng = np.random.Generator(np.random.Philox(key=self.seed))
        return tuple(int(i) for i in rng.permutation(self.clients))

    @property
    def size(self) -> float:
        return float(self.per_round)

    def invited(self, round: int) -> tuple[int, ...]:
        first = round * self.per_round
        return tuple(sorted(self._order[(first + j) % self.clients] for j in range(self.per_round)))

    def rounds_of(self, client: int) -> tuple[int, ...]:
        """Rounds in which a client is invited."""
        turns = range(self._order.index(client), self.rounds * self.per_round, self.clients)
        return tuple(turn // self.per_round for turn in turns)

    def participations(self, client: int) -> int:
        return len(self.rounds_of(client))


@dataclass(frozen=True)
class RandomCohorts:
    """A public random cohort each round: no amplification, and clients refuse beyond `max_participations` (R5)."""

    clients: int
    rounds: int
    per_round: int
    max_participations: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_size(self.per_round, self.clients)
        if self.max_participations < 1:
            raise UserError(f"max_participations must be at least 1, got {self.max_participations}")

    @property
    def size(self) -> float:
        return float(self.per_round)

    def invited(self, round: int) -> tuple[int, ...]:
        rng = np.random.Generator(np.random.Philox(key=[self.seed, round]))
        return tuple(sorted(int(i) for i in rng.choice(self.clients, self.per_round, replace=False)))

    def participations(self, client: int) -> int:
        return min(self.max_participations, self.rounds)


@dataclass(frozen=True)
class SecretPoisson:
    """A trusted server's cohort: each client with probability `rate`, known to that server alone (R5)."""

    clients: int
    rounds: int
    rate: float
    noise: NoiseSource

    @property
    def size(self) -> float:
        return self.rate * self.clients

    def invited(self, round: int) -> tuple[int, ...]:
        coins = self.noise.coins(NoiseKey(SERVER, round, 0, "coins:cohort"), self.clients, self.rate)
        return tuple(int(i) for i in np.flatnonzero(coins))

    def participations(self, client: int) -> int:
        """Every round counts, drawn or not: the amplified event is charged each time."""
        return self.rounds


def public_cohorts(setting: Setting, most: int | None, seed: int) -> Cohorts:
    """A balanced schedule, or random cohorts where clients take part at most `most` times."""
    s = setting
    if most is not None:
        return RandomCohorts(s.clients, s.rounds, s.per_round, most, seed)
    return Balanced(s.clients, s.rounds, s.per_round, seed)


def _holds(cohort: tuple[int, ...], client: int) -> bool:
    """Whether a sorted cohort has this client in it."""
    i = bisect_left(cohort, client)
    return i < len(cohort) and cohort[i] == client


def _check_size(per_round: int, clients: int) -> None:
    if not 1 <= per_round <= clients:
        raise UserError(f"clients per round must lie between 1 and {clients}, got {per_round}")


def rounds_of(cohorts: Cohorts, client: int, rounds: int) -> tuple[int, ...]:
    """Rounds in which a client may take part: all of them where that is not fixed beforehand."""
    if isinstance(cohorts, Balanced | Rotation):
        return cohorts.rounds_of(client)
    return tuple(range(rounds))
