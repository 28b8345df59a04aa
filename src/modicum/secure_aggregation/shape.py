"""How many others hold a client's shares and mask against it: everybody, or k of them that it draws itself.

Beyond `COMPLETE` clients a graph of Bell et al. 2020 ("Secure single-server aggregation with (poly)logarithmic
overhead"), without its trust in who chooses it: every client draws k others, all equally likely, from its own
generator, before it has seen anything of the round, and signs them with its keys. Together with itself they are
its neighbourhood; they hold its shares, of which t open a secret, and each of them masks against it. Nobody else
has a say in an honest client's neighbourhood, so there is nothing that a server could try again and again.

Two things can go wrong with such draws, and both are bounded by exact tails of the hypergeometric distribution:
`failure_probability`, that a sum of too few can be opened, which is charged to δ, and `stall`, that a round comes
to nothing. The argument for the first is in docs/secure-aggregation-protocol.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

COMPLETE = 100  # clients up to which everybody masks against everybody
FAILURE_PROBABILITY = 2.0**-60  # at most, a round: that less than the sum over all honest survivors is opened
STALL = 2.0**-40  # at most, a round: that dropouts who know nothing of the graph leave somebody without t holders
_SLACK = 1e-9  # beyond any error of a logarithm of such numbers


@dataclass(frozen=True)
class Shape:
    """k others hold a client's shares, and any t of them and itself open a secret (`shares`)."""

    neighbours: int
    shares: int


@lru_cache(maxsize=256)
def agree_shape(clients: int, threshold: int, colluders: int, dropouts: int, strays: int) -> Shape:
    """The shape that follows from the other terms: a small k found by halving, or everybody where none is small.

    `strays`: survivors whom a hostile server may have shown other keys or peers than it showed those who sign.
    """
    everybody = Shape(clients - 1, threshold)
    if clients <= COMPLETE:
        return everybody
    low, best = 1, None
    high = (clients - 1) // 2
    while low <= high:
        k = (low + high) // 2
        t = _most_shares(clients, dropouts, k)
        found = (
            Shape(k, t)
            if t and failure_probability(clients, colluders, strays, Shape(k, t)) <= FAILURE_PROBABILITY
            else None
        )
        best, low, high = (found, low, k - 1) if found else (best, k + 1, high)
    return best or everybody


def _most_shares(clients: int, dropouts: int, k: int) -> int:
    """The largest t at which a round survives its dropouts; 0 if there is none."""
    tails = _tails(clients - 1, dropouts, k)
    return max((t for t in range(1, k + 1) if clients * 2.0 ** tails[k - t + 1] <= STALL), default=0)


def stall(clients: int, dropouts: int, shape: Shape) -> float:
    """At most this is the chance that some client, there or gone, has fewer than t holders left.

    Of its k at most k − t may be gone, where d of the others are: union bound over all clients.
    """
    k, t = shape.neighbours, shape.shares
    return 0.0 if k == clients - 1 else min(1.0, clients * 2.0 ** _tails(clients - 1, dropouts, k)[k - t + 1])


def failure_probability(clients: int, colluders: int, strays: int, shape: Shape) -> float:
    """At most this is the chance that honest survivors fall apart into groups whose sums can be opened alone.

    A group of s has at least t − 1 of each member's k draws among its other s − 1 and the c colluders; of a
    stray's draws at least 2t − k − 2. Members draw for themselves, so the chances multiply; union bound over the
    groups of at most half of the honest, and over who of them are strays.
    """
    k, t, honest = shape.neighbours, shape.shares, clients - colluders
    if k == clients - 1:
        return 0.0  # not by chance: two sets of T overlap in an honest client, because 2T > P + c
    total = 0.0
    for s in range(1, honest // 2 + 1):
        tails = _tails(clients - 1, s - 1 + colluders, k)
        steady, stray = tails[max(0, t - 1)], tails[max(0, 2 * t - k - 2)]
        for m in range(min(s, strays) + 1):
            chance = _choices(honest, s) + _choices(s, m) + _times(s - m, steady) + _times(m, stray)
            total += 2.0 ** min(0.0, chance)
        if total >= 1:
            return 1.0
    return total


@lru_cache(maxsize=4096)
def _tails(population: int, marked: int, draws: int) -> tuple[float, ...]:
    """log2 of P(at least j of the draws are marked), j from 0 to draws + 1: sums of whole numbers, rounded up."""
    least = max(0, draws - (population - marked))
    way = math.comb(marked, least) * math.comb(population - marked, draws - least)
    ways = [0] * least + [way]
    for j in range(least, draws):
        way = way * (marked - j) * (draws - j) // ((j + 1) * (population - marked - draws + j + 1))
        ways.append(way)
    found, sum_, all_ = [-math.inf], 0, math.log2(math.comb(population, draws))
    for way in reversed(ways):
        sum_ += way
        found.append(min(0.0, math.log2(sum_) - all_ + _SLACK) if sum_ else -math.inf)
    return tuple(reversed(found))


def _choices(n: int, k: int) -> float:
    """log2 of n over k, rounded up."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) + _SLACK


def _times(count: int, log: float) -> float:
    return count * log if count else 0.0
