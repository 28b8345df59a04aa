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
from modicum.secure_aggregation.shamir import SHARE
from modicum.secure_aggregation.store import Entry, Store
from modicum.secure_aggregation.terms import ProtocolError, Step, Terms, Variant


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

    def __init__(self, terms: Terms, index: int, key: Ed25519PrivateKey, store: Store) -> None:
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
        """Signed one-time public keys and a commitment to the self-mask's seed."""
        asked = self.terms.digest
        if (said := self._repeat(round, Step.KEYS, asked)) is not None:
            return said
        latest = self._store.latest()
        if latest is not None and round <= latest:
            raise ProtocolError(f"round {round} is over: round {latest} has begun")
        secrets = self._new_secrets(round)
        message = self._say(round, Step.KEYS, asked, secrets.public(), secrets.encode())
        self._store.forget(round - 1)
        return message

    def shares(self, round: int, request: bytes) -> bytes:
        """Shares of this round's mask key and seed, sealed for each client whose signed keys were shown."""
        if (said := self._repeat(round, Step.SHARES, request)) is not None:
            return said
        terms, own = self.terms, self._before(round, Step.KEYS)
        secrets = Secrets.decode(own.state)
        body = wire.read_request(terms, round, Step.SHARES, request)
        public = self._read_keys(round, body)
        self._enough(public, "signed keys")
        if own.message not in (m.raw for m in public.values()):
            raise ProtocolError("the bundle of keys lacks this client's own")
        mask = shamir.split(secrets.mask, terms.threshold, tuple(public))
        seed = shamir.split(secrets.seed, terms.threshold, tuple(public))
        sealed = b"".join(
            masks.seal_shares(
                secrets.share, _share_key(m), terms, round, self.index, peer, mask[peer] + seed[peer]
            )
            for peer, m in public.items()
            if peer != self.index
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
        state = self._before(round, Step.SHARES).state
        own, bundle = state[: 2 * SHARE], state[2 * SHARE :]
        public = wire.read_bundle(terms, round, Step.KEYS, bundle, wire.KEYS)
        body = wire.read_request(terms, round, Step.MASKED, request)
        size = wire.set_bytes(terms)
        pool = wire.read_set(terms, body[:size])
        self._check_set(pool, tuple(public), "clients who shared")
        peers = [i for i in pool if i != self.index]
        if len(body) != size + masks.SEALED * len(peers):
            raise ProtocolError("MASKED: as many sealed shares as peers are expected")
        held = {self.index: own}
        for k, peer in enumerate(peers):
            sealed = body[size + k * masks.SEALED : size + (k + 1) * masks.SEALED]
            held[peer] = masks.open_shares(
                secrets.share, _share_key(public[peer]), terms, round, peer, self.index, sealed
            )
        total = _words(vector() if callable(vector) else vector, terms)
        masks.add_stream(total, masks.self_key(secrets.seed, terms, round, self.index), 1)
        for peer in peers:
            key = masks.pair_key(secrets.mask, terms, round, self.index, peer, _mask_key(public[peer]))
            masks.add_stream(total, key, 1 if self.index < peer else -1)
        name = wire.pool_of(terms, wire.view_of(bundle), pool)
        state = name + body[:size] + b"".join(held[i] for i in pool)
        return self._say(round, Step.MASKED, request, name + total.tobytes(), state)

    def consent(self, round: int, request: bytes) -> bytes:
        """A signature over one set of survivors; this client never signs another one for the round."""
        if (said := self._repeat(round, Step.CONSENT, request)) is not None:
            return said
        if self.terms.variant is not Variant.SIGNED_SURVIVORS:
            raise ProtocolError("these terms trust the server to be honest but curious: no survivors are signed")
        name, pool, _ = self._held(round)
        body = wire.read_request(self.terms, round, Step.CONSENT, request)
        self._check_set(wire.read_set(self.terms, body), pool, "survivors")
        return self._say(round, Step.CONSENT, request, name + body, b"")

    def reveal(self, round: int, request: bytes) -> bytes:
        """For each peer one share: of the seed of a survivor, of the mask key of somebody who dropped out.

        Against t clients' signatures over the set that this client signed itself, or, where the terms trust the
        server to be honest but curious, against its word. The round's secrets are destroyed with it.
        """
        if (said := self._repeat(round, Step.REVEAL, request)) is not None:
            return said
        name, pool, held = self._held(round)
        body = wire.read_request(self.terms, round, Step.REVEAL, request)
        chosen = self._agreed_set(round, body, name)
        survivors = wire.read_set(self.terms, chosen)
        self._check_set(survivors, pool, "survivors")
        shares = b"".join(held[i][SHARE:] if i in survivors else held[i][:SHARE] for i in pool)
        return self._say(round, Step.REVEAL, request, name + chosen + shares, b"", erase=True)

    def abandon(self, round: int) -> None:
        """The round is void: destroy its secrets now, and never reveal anything of it."""
        if self._store.read(round, Step.REVEAL) is None:
            self._store.write(round, Step.REVEAL, Entry(b"", b"", b""), erase=True)

    def _new_secrets(self, round: int) -> Secrets:  # noqa: ARG002 - the tests' broken twins use the round
        return Secrets.fresh()

    def _read_keys(self, round: int, body: bytes) -> dict[int, wire.Message]:
        return wire.read_bundle(self.terms, round, Step.KEYS, body, wire.KEYS)

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
        """(name of the pool, its members, the two shares that are held of each)."""
        state, size = self._before(round, Step.MASKED).state, wire.set_bytes(self.terms)
        name, rest = state[: wire.DIGEST], state[wire.DIGEST + size :]
        pool = wire.read_set(self.terms, state[wire.DIGEST : wire.DIGEST + size])
        return name, pool, {i: rest[2 * SHARE * k : 2 * SHARE * (k + 1)] for k, i in enumerate(pool)}

    def _check_set(self, members: tuple[int, ...], within: tuple[int, ...], what: str) -> None:
        if not set(members) <= set(within) or self.index not in members:
            raise ProtocolError(f"the {what} are not among those who went before, or this client is not in them")
        self._enough(members, what)

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


def _mask_key(message: wire.Message) -> bytes:
    return message.body[: wire.KEY]


def _share_key(message: wire.Message) -> bytes:
    return message.body[wire.KEY : 2 * wire.KEY]


def _words(vector: NDArray[np.integer], terms: Terms) -> masks.Words:
    """A copy of the input modulo 2^bits."""
    if vector.shape != (terms.dimension,) or not np.issubdtype(vector.dtype, np.integer):
        raise UserError(f"an input has {terms.dimension} integers, got {vector.dtype} of shape {vector.shape}")
    return vector.astype(terms.dtype)
