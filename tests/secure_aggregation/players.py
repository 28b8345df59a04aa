"""Clients and a server that play whole rounds in one process; some drop out, some messages are spoiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from modicum.secure_aggregation import (
    Client,
    Masked,
    MemoryStore,
    ProtocolError,
    Step,
    SumTerms,
    Variant,
    add_masked,
    gather_consents,
    gather_keys,
    gather_shares,
    open_sum,
)
from modicum.secure_aggregation.client import Secrets
from modicum.secure_aggregation.shape import Shape

Carry = Callable[[Step, int, bytes], Sequence[bytes]]
"""What becomes of a client's message on its way to the server: none, one or several messages arrive."""


def as_is(step: Step, sender: int, message: bytes) -> Sequence[bytes]:  # noqa: ARG001
    return [message]


@lru_cache(maxsize=1024)
def signing_key(index: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(index.to_bytes(2, "big") * 16)


def public_bytes(index: int) -> bytes:
    return signing_key(index).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


class Drawn(SumTerms):
    """SumTerms with a graph of a given shape: at so few clients none would be agreed on."""

    given = Shape(0, 0)

    @cached_property
    def shape(self) -> Shape:
        return self.given


def drawn(neighbours: int, shares: int) -> type[Drawn]:
    return type("DrawnHere", (Drawn,), {"given": Shape(neighbours, shares)})


class NoSecret(Secrets):
    """A mask key of small order: whatever it is multiplied with, nothing secret comes out."""

    def public(self) -> bytes:
        return bytes(32) + super().public()[32:]


class Ring(Client):
    """Draws the next k clients, so that a test knows the graph."""

    def _draw(self) -> tuple[int, ...]:
        return tuple((self.index + j + 1) % self.terms.clients for j in range(self.terms.shape.neighbours))


def terms_for(clients: int, kind: type[SumTerms] = SumTerms, **changes: Any) -> SumTerms:
    c = changes.get("colluders", 0)
    t = changes.pop("threshold", (clients + c) // 2 + 1)
    given: dict[str, Any] = {
        "run": "run-1",
        "keys": tuple(public_bytes(i) for i in range(clients)),
        "threshold": t,
        "colluders": c,
        "dropouts": clients - t,
        "dimension": 8,
    }
    return kind(**(given | changes))


def players(terms: SumTerms, kind: type[Client] = Client) -> dict[int, Client]:
    return {i: kind(terms, i, signing_key(i), MemoryStore()) for i in range(terms.clients)}


@dataclass
class Round:
    """One round. `gone[step]` are those who say nothing from that step on. `seen` is all that clients sent.

    `carry` spoils what clients send, `deliver` what they are asked.
    """

    terms: SumTerms
    clients: Mapping[int, Client]
    inputs: Mapping[int, np.ndarray]
    number: int = 1
    gone: Mapping[Step, Collection[int]] = field(default_factory=dict)
    carry: Carry = as_is
    deliver: Callable[[Step, int, bytes], bytes] = lambda _step, _client, request: request
    seen: dict[Step, dict[int, bytes]] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()

    def play(self) -> np.ndarray:
        """The sum, or `VoidError`."""
        return self.finish(self.until_masked())

    def until_masked(self) -> Masked:
        r = self.number
        keys = gather_keys(self.terms, r, self.ask(Step.KEYS, self.clients, lambda c, _: c.keys(r)))
        shared = self.ask(Step.SHARES, keys.members, lambda c, q: c.shares(r, q), lambda _: keys.request)
        pool = gather_shares(self.terms, keys, shared)
        sent = self.ask(
            Step.MASKED,
            pool.members,
            lambda c, q: c.masked(r, q, self.inputs[c.index]),
            lambda i: pool.requests[i],
        )
        masked = add_masked(self.terms, pool, sent)
        self.survivors = masked.survivors
        return masked

    def finish(self, masked: Masked) -> np.ndarray:
        r, request = self.number, masked.request
        if self.terms.variant is Variant.SIGNED_SURVIVORS:
            signed = self.ask(
                Step.CONSENT, masked.survivors, lambda c, q: c.consent(r, q), lambda _: masked.request
            )
            request = gather_consents(self.terms, masked, signed)
        return open_sum(
            self.terms,
            masked,
            self.ask(Step.REVEAL, masked.survivors, lambda c, q: c.reveal(r, q), lambda _: request),
        )

    def ask(
        self,
        step: Step,
        whom: Collection[int],
        answer: Callable[[Client, bytes], bytes],
        request: Callable[[int], bytes] = lambda _: b"",
    ) -> list[bytes]:
        away = {i for s, gone in self.gone.items() if s <= step for i in gone}
        arrived: list[bytes] = []
        self.seen[step] = {}
        for i in whom:
            if i in away:
                continue
            try:
                message = answer(self.clients[i], self.deliver(step, i, request(i)))
            except ProtocolError:
                continue  # it refuses, and is a dropout
            self.seen[step][i] = message
            arrived += self.carry(step, i, message)
        return arrived

    def true_sum(self) -> np.ndarray:
        total = np.zeros(self.terms.dimension, dtype=self.terms.dtype)
        for i in self.survivors:
            total += self.inputs[i].astype(self.terms.dtype)
        return total


def random_inputs(terms: SumTerms, rng: np.random.Generator) -> dict[int, np.ndarray]:
    return {i: rng.integers(-(2**40), 2**40, terms.dimension) for i in range(terms.clients)}
