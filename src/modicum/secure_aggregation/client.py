"""A client: five messages a round, each on disk before it is sent.

Asked again, a client repeats its bytes; asked something else for the same round and step, it refuses. So nothing
that a server does, and no crash, makes it sign two sets of survivors, mask two inputs with the same keys, or
reveal both shares that it holds of a peer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from modicum.errors import UserError
from modicum.secure_aggregation import masks, shamir, wire
from modicum.secure_aggregation.graph import Graph, draw_neighbours
from modicum.secure_aggregation.shamir import SHARE
from modicum.secure_aggregation.store import Entry, Store
from modicum.secure_aggregation.terms import ProtocolError, Step, SumTerms, Variant


@dataclass(frozen=True)
class Secrets:
    """New in every round: two X25519 private keys and the seed of the mask that is the client's own."""

    mask: bytes
    share: bytes
    seed: bytes

    @classmethod
    def fresh(cls) -> Secrets:
        """New secrets from the operating system's generator."""
        return cls(masks.new_key(), masks.new_key(), os.urandom(32))

    def public(self) -> bytes:
        """What others learn of them: two public keys and a commitment to the seed."""
        return masks.public_key(self.mask) + masks.public_key(self.share) + masks.commitment(self.seed)

    def encode(self) -> bytes:
        """The bytes that a client stores for itself."""
        return self.mask + self.share + self.seed

    @classmethod
    def decode(cls, state: bytes) -> Secrets:
        """Back from `encode`."""
        return cls(state[:32], state[32:64], state[64:96])


class Client:
    """Client `index` of a run. `key` signs; `store` remembers. Rounds are numbered upwards and used once.

    The keys and shares of round r + 1 may be exchanged while round r is under way; older rounds are forgotten.
    Where cohorts change, each has terms of its own: one `Client` for each, all with the run's one store.
    """

    def __init__(self, terms: SumTerms, index: int, key: Ed25519PrivateKey, store: Store) -> None:
        if not 0 <= index < terms.clients:
            raise UserError(f"secure aggregation has clients 0 to {terms.clients - 1}, got {index}")
        if key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw) != terms.keys[index]:
            raise UserError(f"this signing key is not the one that the terms name for client {index}")
        self.terms, self.index = terms, index
        self._key, self._store = key, store

    def said(self, round: int, step: Step) -> bytes | None:
        """The message of an earlier call, to be sent again as it is."""
        entry = self._store.read(round, step)
        return None if entry is None else entry.message

    def keys(self, round: int) -> bytes:
        """Signed one-time public keys, a commitment to the self-mask's seed, and whom this client drew."""
        asked = self.terms.digest
        if (said := self._repeat(round, Step.KEYS, asked)) is not None:
            return said
        latest = self._store.latest()
        if latest is not None and round <= latest:
            raise ProtocolError(f"round {round} is over: round {latest} has begun")
        secrets = self._new_secrets(round)
        drawn = wire.write_set(self.terms, self._draw()) if self.terms.sparse else b""
        message = self._say(round, Step.KEYS, asked, secrets.public() + drawn, secrets.encode())
        self._store.forget(round - 1)
        return message

    def shares(self, round: int, request: bytes) -> bytes:
        """Shares of this round's mask key and seed, sealed for each neighbour whose signed keys were shown."""
        if (said := self._repeat(round, Step.SHARES, request)) is not None:
            return said
        terms, own = self.terms, self._before(round, Step.KEYS)
        secrets = Secrets.decode(own.state)
        body = wire.read_request(terms, round, Step.SHARES, request)
        messages = self._read_keys(round, body)
        self._enough(messages, "signed keys")
        if own.message not in (m.raw for m in messages.values()):
            raise ProtocolError("the bundle of keys lacks this client's own")
        public = {i: m.body for i, m in messages.items()}
        graph = Graph(terms, public)
        self._check_set(graph, tuple(public), tuple(public), "clients with signed keys")
        holders = graph.holders(self.index, public)
        mask = shamir.split(secrets.mask, terms.shape.shares, holders)
        seed = shamir.split(secrets.seed, terms.shape.shares, holders)
        sealed = b"".join(
            masks.seal_shares(secrets.share, _share_key(public[j]), terms, round, self.index, j, mask[j] + seed[j])
            for j in holders
            if j != self.index
        )
        state = mask[self.index] + seed[self.index] + body
        return self._say(round, Step.SHARES, request, wire.view_of(body) + sealed, state)

    def masked(
        self, round: int, request: bytes, vector: NDArray[np.integer] | Callable[[], NDArray[np.integer]]
    ) -> bytes:
        """The input plus its own mask plus or minus one mask for each peer, modulo 2^bits.

        An input that is still to be computed is asked for once the request has been found in order.
        """
        if (said := self._repeat(round, Step.MASKED, request)) is not None:
            return said
        terms, secrets = self.terms, Secrets.decode(self._before(round, Step.KEYS).state)
        own, bundle, public = self._shown(round)
        graph = Graph(terms, public)
        body = wire.read_request(terms, round, Step.MASKED, request)
        size = wire.set_bytes(terms)
        pool = wire.read_set(terms, body[:size])
        self._check_set(graph, pool, tuple(public), "clients who shared")
        owners = graph.owners(self.index, pool)
        if len(body) != size + masks.SEALED * (len(owners) - 1):
            raise ProtocolError("MASKED: as many sealed shares as neighbours who drew this client are expected")
        held = {self.index: own}
        for k, owner in enumerate(i for i in owners if i != self.index):
            sealed = body[size + k * masks.SEALED : size + (k + 1) * masks.SEALED]
            held[owner] = masks.open_shares(
                secrets.share, _share_key(public[owner]), terms, round, owner, self.index, sealed
            )
        total = _words(vector() if callable(vector) else vector, terms)
        masks.add_stream(total, masks.self_key(secrets.seed, terms, round, self.index), 1)
        for peer in graph.peers(self.index, pool):
            key = masks.pair_key(secrets.mask, terms, round, self.index, peer, _mask_key(public[peer]))
            masks.add_stream(total, key, 1 if self.index < peer else -1)
        name = wire.pool_of(terms, wire.view_of(bundle), pool)
        state = name + body[:size] + b"".join(held[i] for i in owners)
        return self._say(round, Step.MASKED, request, name + total.tobytes(), state)

    def consent(self, round: int, request: bytes) -> bytes:
        """A signature over one set of survivors; this client never signs another one for the round."""
        if (said := self._repeat(round, Step.CONSENT, request)) is not None:
            return said
        if self.terms.variant is not Variant.SIGNED_SURVIVORS:
            raise ProtocolError("these terms trust the server to be honest but curious: no survivors are signed")
        name, pool, _ = self._held(round)
        body = wire.read_request(self.terms, round, Step.CONSENT, request)
        self._check_set(self._graph(round), wire.read_set(self.terms, body), pool, "survivors")
        return self._say(round, Step.CONSENT, request, name + body, b"")

    def reveal(self, round: int, request: bytes) -> bytes:
        """One share for each client that drew this one: of a survivor's seed, of a dropout's mask key.

        Against t clients' signatures over the set that this client signed itself, or, where the terms trust the
        server to be honest but curious, against its word. The round's secrets are destroyed with it.
        """
        if (said := self._repeat(round, Step.REVEAL, request)) is not None:
            return said
        name, pool, held = self._held(round)
        body = wire.read_request(self.terms, round, Step.REVEAL, request)
        chosen = self._agreed_set(round, body, name)
        survivors = wire.read_set(self.terms, chosen)
        self._check_set(self._graph(round), survivors, pool, "survivors")
        shares = b"".join(both[SHARE:] if i in survivors else both[:SHARE] for i, both in held.items())
        return self._say(round, Step.REVEAL, request, name + chosen + shares, b"", erase=True)

    def abandon(self, round: int) -> None:
        """The round is void: destroy its secrets now, and never reveal anything of it."""
        if self._store.read(round, Step.REVEAL) is None:
            self._store.write(round, Step.REVEAL, Entry(b"", b"", b""), erase=True)

    def _new_secrets(self, round: int) -> Secrets:
        return Secrets.fresh()

    def _draw(self) -> tuple[int, ...]:
        return draw_neighbours(self.terms, self.index)

    def _read_keys(self, round: int, body: bytes) -> dict[int, wire.Message]:
        messages = wire.read_bundle(self.terms, round, Step.KEYS, body, wire.keys_length(self.terms))
        for sender, message in messages.items():
            wire.check_keys(self.terms, sender, message.body)
        return messages

    def _shown(self, round: int) -> tuple[bytes, bytes, dict[int, bytes]]:
        """(this client's two shares of its own, the bundle of keys that it was shown, their bodies by sender)."""
        state = self._before(round, Step.SHARES).state
        own, bundle = state[: 2 * SHARE], state[2 * SHARE :]
        return own, bundle, wire.stored_bundle(bundle, wire.keys_length(self.terms))

    def _graph(self, round: int) -> Graph:
        return Graph(self.terms, self._shown(round)[2])

    def _agreed_set(self, round: int, body: bytes, name: bytes) -> bytes:
        """The set of survivors, in its encoding, that this client may reveal shares for."""
        if self.terms.variant is Variant.HONEST_BUT_CURIOUS:
            return body
        own = self._before(round, Step.CONSENT).message[wire.HEADER.size : -wire.SIGNATURE]
        consents = wire.read_bundle(self.terms, round, Step.CONSENT, body, len(own))
        if any(m.body != own for m in consents.values()):
            raise ProtocolError("clients have signed different survivors, or saw different keys")
        chosen = own[len(name) :]
        if not set(consents) <= set(wire.read_set(self.terms, chosen)):
            raise ProtocolError("somebody signed who is no survivor")
        self._enough(consents, "signatures over the survivors")
        return chosen

    def _held(self, round: int) -> tuple[bytes, tuple[int, ...], dict[int, bytes]]:
        """(name of the pool, its members, the two shares that are held of each who drew this client)."""
        state, size = self._before(round, Step.MASKED).state, wire.set_bytes(self.terms)
        name, rest = state[: wire.DIGEST], state[wire.DIGEST + size :]
        pool = wire.read_set(self.terms, state[wire.DIGEST : wire.DIGEST + size])
        owners = self._graph(round).owners(self.index, pool)
        return name, pool, {i: rest[2 * SHARE * k : 2 * SHARE * (k + 1)] for k, i in enumerate(owners)}

    def _check_set(self, graph: Graph, members: tuple[int, ...], within: tuple[int, ...], what: str) -> None:
        if not set(members) <= set(within) or self.index not in members:
            raise ProtocolError(f"the {what} are not among those who went before, or this client is not in them")
        self._enough(members, what)
        if lonely := graph.lonely(members, members):
            least = self.terms.shape.shares
            raise ProtocolError(
                f"client {lonely[0]} has fewer than {least} holders of its shares among the {what}"
            )

    def _enough(self, members: Sequence[int] | dict[int, wire.Message], what: str) -> None:
        if len(members) < self.terms.threshold:
            raise ProtocolError(f"{len(members)} {what} are fewer than the threshold {self.terms.threshold}")

    def _before(self, round: int, step: Step) -> Entry:
        entry = self._store.read(round, step)
        if entry is None:
            raise ProtocolError(f"round {round}: asked before this client has answered {step.name}")
        # One store serves cohorts with terms of their own: shares held under one are not revealed under another.
        if not entry.message.startswith(self._header(round, step)):
            raise ProtocolError(f"round {round}: this client answered {step.name} under other terms")
        if not entry.state and step is not Step.CONSENT:
            raise ProtocolError(f"round {round} is over: its secrets are destroyed")
        return entry

    def _header(self, round: int, step: Step) -> bytes:
        return wire.header(self.terms, round, step, self.index)

    def _repeat(self, round: int, step: Step, request: bytes) -> bytes | None:
        wire.check_round(round)
        entry = self._store.read(round, step)
        if entry is None:
            return None
        if entry.request != hashlib.sha256(request).digest():
            raise ProtocolError(f"round {round}, {step.name}: already answered to another request")
        return entry.message

    def _say(
        self, round: int, step: Step, request: bytes, body: bytes, state: bytes, *, erase: bool = False
    ) -> bytes:
        message = wire.sign(self.terms, round, step, self.index, body, self._key)
        self._store.write(round, step, Entry(hashlib.sha256(request).digest(), state, message), erase=erase)
        return message


def _mask_key(body: bytes) -> bytes:
    return body[: wire.KEY]


def _share_key(body: bytes) -> bytes:
    return body[wire.KEY : 2 * wire.KEY]


def _words(vector: NDArray[np.integer], terms: SumTerms) -> masks.Words:
    """A copy of the input modulo 2^bits."""
    if vector.shape != (terms.dimension,) or not np.issubdtype(vector.dtype, np.integer):
        raise UserError(f"an input has {terms.dimension} integers, got {vector.dtype} of shape {vector.shape}")
    return vector.astype(terms.dtype)
