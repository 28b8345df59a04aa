"""Who holds whose shares in a round, and who masks against whom: read off the clients' signed keys."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from modicum.secure_aggregation import wire
from modicum.secure_aggregation.terms import SumTerms


def draw_neighbours(terms: SumTerms, index: int) -> tuple[int, ...]:
    """k others, every set of them equally likely, from the operating system's generator."""
    others = [i for i in range(terms.clients) if i != index]
    return tuple(sorted(secrets.SystemRandom().sample(others, terms.shape.neighbours)))


class Graph:
    """One round's. A client belongs to its own neighbourhood; on the complete graph everybody does."""

    def __init__(self, terms: SumTerms, keys: Mapping[int, bytes]) -> None:
        """`keys`: the bodies of signed KEYS messages, whose draws have been checked."""
        self._shares = terms.shape.shares
        senders = list(keys)
        self._holds = np.zeros((terms.clients, terms.clients), dtype=bool)  # [i, j]: j holds shares of i's secrets
        if terms.sparse:
            drawn = np.frombuffer(b"".join(body[3 * wire.KEY :] for body in keys.values()), dtype=np.uint8)
            bits = np.unpackbits(drawn.reshape(len(senders), -1), axis=1, bitorder="little")
            self._holds[senders] = bits[:, : terms.clients]
            self._holds[senders, senders] = True
        else:
            self._holds[senders] = True

    def holders(self, owner: int, within: Collection[int]) -> tuple[int, ...]:
        """Those of `within` who hold shares of the owner's secrets, by number."""
        return _those(within, self._holds[owner])

    def owners(self, holder: int, within: Collection[int]) -> tuple[int, ...]:
        """Those of `within` of whose secrets this client holds shares, by number."""
        return _those(within, self._holds[:, holder])

    def peers(self, client: int, within: Collection[int]) -> tuple[int, ...]:
        """Those of `within` against whom a client masks: whom it drew, and who drew it."""
        linked = self._holds[client] | self._holds[:, client]
        return tuple(j for j in _those(within, linked) if j != client)

    def lonely(self, owners: Collection[int], within: Collection[int]) -> tuple[int, ...]:
        """The owners who have fewer than t holders within a set: their secrets could not be opened."""
        counts = self._holds[:, sorted(within)].sum(axis=1)
        return _those(owners, counts < self._shares)


def _those(members: Collection[int], chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    numbers = np.array(sorted(members), dtype=np.int64)
    return tuple(numbers[chosen[numbers]].tolist())
