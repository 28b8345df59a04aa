"""A silo's side of secure aggregation: the terms of each round, and every step on disk before it is answered.

Server and silos derive the terms from their own copies of the experiment file and from the invitation. Whoever has
others signs under another digest, and everybody refuses what it says.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from modicum import secure_aggregation as protocol
from modicum.core.integers import Agreed
from modicum.deploy.silo.signing import read_public, read_signing_key
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.terms import Join, Terms
from modicum.deploy.silo.wire import Code, Kind, Refuse
from modicum.errors import UserError
from modicum.federation.protocol_parties import protocol_terms
from modicum.federation.secure_sums import modulus
from modicum.privacy.noise.integer_terms import IntegerTerms
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.views import SecureAggregation

LOG = logging.getLogger("modicum.silo")
STORE = "secure.sqlite"


@dataclass(frozen=True)
class SecureTerms:
    """What all parties of a run's secure aggregation agree on, round by round."""

    join: Join
    terms: Terms
    agreed: Agreed

    def names(self, round: int) -> tuple[str, ...]:
        """The round's cohort; client i of the protocol is the i-th of them."""
        return tuple(sorted(self.terms.names[i] for i in self.terms.cohorts.invited(round)))

    def due(self, round: int) -> tuple[str, ...]:
        """Declared metrics of the round: further coordinates of its sum."""
        return tuple(m.name for m in self.terms.metrics if round % m.every == 0)

    def of(self, round: int) -> protocol.SumTerms:
        """The protocol's public terms of one round."""
        view = self.terms.spec.view
        assert isinstance(view, SecureAggregation)
        return protocol_terms(
            view,
            [self.keys[name] for name in self.names(round)],
            run=self.join.run,
            dimension=self._dimension(round),
            bits=modulus(self.agreed),
            context=self._context,
        )

    @cached_property
    def keys(self) -> dict[str, bytes]:
        """Every silo's public signing key, as agreed in the experiment file."""
        silos = self.terms.config.run.silos
        return {name: read_public(name, silos[name].key if name in silos else "") for name in self.terms.names}

    @cached_property
    def _context(self) -> str:
        """Lattice, noise and scale of every client and query, and the whole invitation."""
        integers = {
            name: {purpose: noise.to_dict() for purpose, noise in queries.items()}
            for name, queries in self.agreed.clients.items()
        }
        text = self.join.encode() + json.dumps(integers, sort_keys=True).encode()
        return hashlib.sha256(text).hexdigest()

    def _dimension(self, round: int) -> int:
        blocks = {m.name: m.block for m in self.terms.metrics}
        purposes = (self.terms.method.mechanism.purpose, *(blocks[name] for name in self.due(round)))
        return sum(self.agreed.terms(purpose).lattice.dimension for purpose in purposes)


def check_terms(terms: SecureTerms) -> None:
    """Raises `UserError` where no sound secure aggregation follows from what was agreed."""
    first = terms.of(0)  # 2t > P + c, t ≤ P − d, a key of its own for every silo
    for queries in terms.agreed.clients.values():
        for noise in queries.values():
            if (noise.honest, noise.clients) != (first.honest, first.clients):
                raise UserError(
                    f"the noise of {noise.honest} of {noise.clients} silos is counted, and only {first.honest} of "
                    f"{first.clients} are certain to be honest and in every sum"
                )
            if IntegerTerms.of(noise).wrap > 1e-6:
                raise UserError("a sum of so many silos would not fit its modulus: agree on other terms")


class SecureSilo:
    """Answers the steps of secure aggregation, in rounds that go forward. Refuses by `Refuse`."""

    def __init__(self, terms: SecureTerms, spec: SiloSpec, charged: set[int]) -> None:
        self.terms, self.name, self._key = terms, spec.name, read_signing_key(spec.key)
        path, own = spec.folder / STORE, terms.keys[spec.name]
        if charged and not path.exists():
            raise UserError(f"{path} is missing, though rounds were charged: put it back, or leave this run")
        self._store = protocol.SqliteStore(path, terms.join.run, own)
        latest = self._store.latest()
        if charged and (latest is None or latest < max(charged)):
            raise UserError(f"{path} is an older copy, without round {max(charged) + 1}: put the last one back")

    def close(self) -> None:
        """Let go of the protocol's store."""
        self._store.close()

    def answer(self, kind: Kind, round: int, request: bytes, vector: Callable[[], Integers]) -> bytes:
        """The signed message of one step; `vector` is computed, and charged, once the request is in order."""
        client = self._client(round)
        try:
            match kind:
                case Kind.KEYS if not request:
                    self._abandon_before(round)
                    return client.keys(round)
                case Kind.SHARES:
                    return client.shares(round, request)
                case Kind.MASKED:
                    return client.masked(round, request, vector)
                case Kind.CONSENT:
                    return client.consent(round, request)
                case Kind.REVEAL:
                    return client.reveal(round, request)
        except protocol.ProtocolError as odd:
            LOG.warning("secure aggregation: %s", odd)
            raise Refuse(Code.OUT_OF_STEP) from None
        raise Refuse(Code.MALFORMED)

    def finish(self) -> None:
        """The run is over: nothing more is revealed of its last round."""
        latest = self._store.latest()
        if latest is not None:
            self._abandon_before(latest + 1)

    def _client(self, round: int) -> protocol.Client:
        if round >= self.terms.terms.config.run.rounds:
            raise Refuse(Code.TOO_MANY_ROUNDS)
        names = self.terms.names(round)
        if self.name not in names:
            raise Refuse(Code.NOT_PLANNED)
        return protocol.Client(self.terms.of(round), names.index(self.name), self._key, self._store)

    def _abandon_before(self, round: int) -> None:
        """A server that begins a round has done with those before: their secrets are destroyed."""
        latest = self._store.latest()
        if latest is not None and latest < round and self.name in self.terms.names(latest):
            self._client(latest).abandon(latest)
