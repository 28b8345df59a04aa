"""A server and c clients who put together all that they see, and take away every mask that they can compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import chi2

from modicum.secure_aggregation import Client, Step, SumTerms, masks, shamir, wire
from modicum.secure_aggregation.client import Secrets
from modicum.secure_aggregation.graph import Graph
from modicum.secure_aggregation.shamir import SHARE
from tests.secure_aggregation.players import Round

FALSE_ALARM = 1e-6


def uniform(words: np.ndarray) -> bool:
    """Whether bytes look uniform: chi-square over 256 values, false alarm one in a million."""
    seen = np.bincount(np.frombuffer(words.tobytes(), dtype=np.uint8), minlength=256)
    expected = seen.sum() / 256
    return float(chi2.sf(np.sum((seen - expected) ** 2) / expected, 255)) > FALSE_ALARM


def share_of(secret: str, both: bytes) -> bytes:
    return both[:SHARE] if secret == "mask" else both[SHARE:]


@dataclass
class Adversary:
    """Knows the terms, every message, and all that `colluders` know. It remembers secrets over rounds."""

    terms: SumTerms
    colluders: Collection[int]
    mask_keys: dict[bytes, bytes] = field(default_factory=dict)  # by public key
    seeds: dict[bytes, bytes] = field(default_factory=dict)  # by commitment

    def watch(self, game: Round, reveals: Iterable[bytes] = ()) -> None:
        """Learn from a round: what was revealed (`reveals` besides what is in its log) and what colluders hold."""
        shares: dict[tuple[int, str], dict[int, bytes]] = defaultdict(dict)
        for raw in [*game.seen.get(Step.REVEAL, {}).values(), *reveals]:
            self._read_reveal(game, raw, shares)
        for i in self.colluders:
            self._ask_colluder(game, game.clients[i], shares)
        public = self.public(game)
        for (owner, secret), held in shares.items():
            self.learn(public[owner], secret, held)

    def learn(self, public: bytes, secret: str, held: dict[int, bytes]) -> None:
        least = self.terms.shape.shares
        if len(held) < least:
            return
        chosen = sorted(held)[:least]
        found = shamir.combine(held, shamir.weights(chosen))
        if found is not None and secret == "mask" and masks.public_key(found) == public[:32]:
            self.mask_keys[public[:32]] = found
        if found is not None and secret == "seed" and masks.commitment(found) == public[64:96]:
            self.seeds[public[64:96]] = found

    def public(self, game: Round) -> dict[int, bytes]:
        return {i: m[wire.HEADER.size : -wire.SIGNATURE] for i, m in game.seen[Step.KEYS].items()}

    def residual(self, game: Round, victims: Collection[int]) -> np.ndarray:
        """The victims' masked inputs, added up, without all masks that are known."""
        graph = Graph(self.terms, self.public(game))
        total = np.zeros(self.terms.dimension, dtype=self.terms.dtype)
        public, round = self.public(game), game.number
        pool = sorted(game.seen[Step.SHARES])
        for i in victims:
            body = game.seen[Step.MASKED][i][wire.HEADER.size : -wire.SIGNATURE]
            total += np.frombuffer(body[wire.DIGEST :], dtype=self.terms.dtype)
            if (seed := self.seeds.get(public[i][64:96])) is not None:
                masks.add_stream(total, masks.self_key(seed, self.terms, round, i), -1)
            for j in graph.peers(i, pool):
                if j not in victims and (key := self._pair(public, round, i, j)) is not None:
                    masks.add_stream(total, key, -1 if i < j else 1)
        return total

    def residual_alone(self, game: Round, victim: int) -> np.ndarray:
        """A masked input without its own mask, for a client that masked against nobody."""
        body = game.seen[Step.MASKED][victim][wire.HEADER.size : -wire.SIGNATURE]
        total = np.frombuffer(body[wire.DIGEST :], dtype=self.terms.dtype).copy()
        seed = self.seeds[self.public(game)[victim][64:96]]
        masks.add_stream(total, masks.self_key(seed, self.terms, game.number, victim), -1)
        return total

    def _pair(self, public: dict[int, bytes], round: int, i: int, j: int) -> bytes | None:
        for own, peer in ((i, j), (j, i)):
            if (private := self.mask_keys.get(public[own][:32])) is not None:
                return masks.pair_key(private, self.terms, round, own, peer, public[peer][:32])
        return None

    def _read_reveal(self, game: Round, raw: bytes, shares: dict[tuple[int, str], dict[int, bytes]]) -> None:
        body, size = raw[wire.HEADER.size : -wire.SIGNATURE], wire.set_bytes(self.terms)
        sender = wire.HEADER.unpack_from(raw)[-1]
        survivors = wire.read_set(self.terms, body[32 : 32 + size])
        graph = Graph(self.terms, self.public(game))
        for k, owner in enumerate(graph.owners(sender, game.seen[Step.SHARES])):
            kind = "seed" if owner in survivors else "mask"
            shares[owner, kind][sender] = body[32 + size + SHARE * k : 32 + size + SHARE * (k + 1)]

    def _ask_colluder(self, game: Round, client: Client, shares: dict[tuple[int, str], dict[int, bytes]]) -> None:
        """A colluder writes down its secrets as it goes: the harness keeps them in `spies`."""
        secrets, held = spies[id(client)][game.number]
        public = secrets.public()
        self.mask_keys[public[:32]], self.seeds[public[64:96]] = secrets.mask, secrets.seed
        for owner, both in held.items():
            for kind in ("mask", "seed"):
                shares[owner, kind][client.index] = share_of(kind, both)


spies: dict[int, dict[int, tuple[Secrets, dict[int, bytes]]]] = defaultdict(dict)


def spy(game: Round, colluders: Collection[int]) -> None:
    """Copy what colluders hold before their own store destroys it: call between MASKED and REVEAL."""
    for i in colluders:
        client = game.clients[i]
        entry = client._store.read(game.number, Step.KEYS)
        assert entry is not None
        spies[id(client)][game.number] = (Secrets.decode(entry.state), client._held(game.number)[2])
