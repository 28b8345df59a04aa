"""The server: carries messages, adds masked inputs, and takes away the masks that the clients let it take away.

Pure functions. Each keeps what is valid of one step's messages and lists what it refused; a message that is
missing or refused makes its sender a dropout. With fewer than t left there is no sum (`VoidError`), and whatever
is opened is checked against what the clients committed to, so that a sum is exact or there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from modicum.secure_aggregation import masks, shamir, wire
from modicum.secure_aggregation.graph import Graph
from modicum.secure_aggregation.shamir import SHARE
from modicum.secure_aggregation.terms import ProtocolError, Step, SumTerms, Variant, VoidError


@dataclass(frozen=True)
class Keys:
    """After KEYS: whose signed keys came, and the request that carries them to all of them."""

    round: int
    messages: Mapping[int, wire.Message]
    request: bytes
    view: bytes
    refused: tuple[str, ...]
    graph: Graph
    valid: tuple[int, ...]  # whose message was in order, with or without enough holders of its shares

    @property
    def members(self) -> tuple[int, ...]:
        """Clients whose keys are in, by number."""
        return tuple(self.messages)


@dataclass(frozen=True)
class Pool:
    """After SHARES: who masks against whom. `requests[i]` carries to client i what was sealed for it."""

    keys: Keys
    members: tuple[int, ...]
    requests: Mapping[int, bytes]
    name: bytes
    refused: tuple[str, ...]
    valid: tuple[int, ...]  # whose message was in order, with or without enough holders of its shares


@dataclass(frozen=True)
class Masked:
    """After MASKED: the sum of the survivors' masked inputs. `request` shows the survivors to them.

    It asks for CONSENT; where the terms trust an honest-but-curious server it asks for REVEAL at once.
    """

    pool: Pool
    survivors: tuple[int, ...]
    request: bytes
    refused: tuple[str, ...]
    total: masks.Words = field(repr=False)

    @property
    def dropped(self) -> tuple[int, ...]:
        """Members who sent no masked input: their pairwise masks have to be reconstructed."""
        return tuple(i for i in self.pool.members if i not in self.survivors)


def gather_keys(terms: SumTerms, round: int, messages: Iterable[bytes]) -> Keys:
    """The first step: signed keys of all who answer; fewer than the threshold end the round."""
    lengths = dict.fromkeys(range(terms.clients), wire.keys_length(terms))
    came, refused = _valid(terms, round, Step.KEYS, messages, lengths)
    _enough(terms, came, "signed keys")
    graph = Graph(terms, {i: m.body for i, m in came.items()})
    kept = {i: came[i] for i in _with_holders(graph, came)}
    _enough(terms, kept, "clients with holders for their shares", came)
    body = wire.bundle(kept.values())
    request = wire.request(terms, round, Step.SHARES, body)
    return Keys(round, kept, request, wire.view_of(body), refused, graph, tuple(came))


def _with_holders(graph: Graph, members: Iterable[int]) -> tuple[int, ...]:
    """Those who have t holders of their shares among those who are left: the others drop out here."""
    left = tuple(sorted(members))
    while lonely := graph.lonely(left, left):
        left = tuple(i for i in left if i not in lonely)
    return left


def gather_shares(terms: SumTerms, keys: Keys, messages: Iterable[bytes]) -> Pool:
    """The second step: sealed shares, passed on to those whom they are for."""
    graph = keys.graph
    holders = {i: [j for j in graph.holders(i, keys.members) if j != i] for i in keys.members}
    lengths = {i: wire.DIGEST + masks.SEALED * len(holders[i]) for i in keys.members}
    kept, refused = _valid(terms, keys.round, Step.SHARES, messages, lengths, keys.view)
    _enough(terms, kept, "clients who shared")
    members = _with_holders(graph, kept)
    _enough(terms, members, "clients whose shares are held", kept)
    sealed = {i: _sealed_by(kept[i], holders[i]) for i in members}
    chosen = wire.write_set(terms, members)
    requests = {}
    for i in members:
        parts = [sealed[j][i] for j in graph.owners(i, members) if j != i]
        requests[i] = wire.request(terms, keys.round, Step.MASKED, chosen + b"".join(parts))
    return Pool(keys, members, requests, wire.pool_of(terms, keys.view, members), refused, tuple(kept))


def _sealed_by(message: wire.Message, holders: Iterable[int]) -> dict[int, bytes]:
    parts = message.body[wire.DIGEST :]
    return {j: parts[k * masks.SEALED : (k + 1) * masks.SEALED] for k, j in enumerate(holders)}


def add_masked(terms: SumTerms, pool: Pool, messages: Iterable[bytes]) -> Masked:
    """Messages are added as they come and need not be kept."""
    total = np.zeros(terms.dimension, dtype=terms.dtype)
    lengths = dict.fromkeys(pool.members, wire.DIGEST + terms.dimension * terms.dtype.itemsize)
    survivors: set[int] = set()
    refused: list[str] = []
    for raw in messages:
        kept, why = _valid(terms, pool.keys.round, Step.MASKED, [raw], lengths, pool.name)
        refused += why
        for sender, message in kept.items():
            if sender in survivors:
                refused.append(f"MASKED: client {sender} sent a message before")
                continue
            total += np.frombuffer(message.body, dtype=terms.dtype, offset=wire.DIGEST)
            survivors.add(sender)
    return masked_sum(terms, pool, survivors, total, refused)


def masked_sum(
    terms: SumTerms, pool: Pool, survivors: Iterable[int], total: masks.Words, refused: Iterable[str] = ()
) -> Masked:
    """Masked inputs that are added up already, such as those that a server wrote down before it died."""
    chosen = tuple(sorted(survivors))
    _enough(terms, chosen, "survivors")
    if lonely := pool.keys.graph.lonely(pool.members, chosen):
        text = f"too few survivors hold shares of client {lonely[0]}'s secrets: the round is void"
        raise VoidError(text, members=chosen)
    step = Step.CONSENT if terms.variant is Variant.SIGNED_SURVIVORS else Step.REVEAL
    request = wire.request(terms, pool.keys.round, step, wire.write_set(terms, chosen))
    return Masked(pool, chosen, request, tuple(refused), total)


def gather_consents(terms: SumTerms, masked: Masked, messages: Iterable[bytes]) -> bytes:
    """The request for REVEAL: the survivors' signatures over their set."""
    same = masked.pool.name + wire.write_set(terms, masked.survivors)
    round = masked.pool.keys.round
    lengths = dict.fromkeys(masked.survivors, len(same))
    kept, _ = _valid(terms, round, Step.CONSENT, messages, lengths, same)
    _enough(terms, kept, "signatures over the survivors")
    return wire.request(terms, round, Step.REVEAL, wire.bundle(kept.values()))


def open_sum(terms: SumTerms, masked: Masked, messages: Iterable[bytes]) -> masks.Words:
    """The exact sum of the survivors' inputs modulo 2^bits."""
    pool, round = masked.pool, masked.pool.keys.round
    same = pool.name + wire.write_set(terms, masked.survivors)
    owners = {i: pool.keys.graph.owners(i, pool.members) for i in masked.survivors}
    lengths = {i: len(same) + SHARE * len(owners[i]) for i in masked.survivors}
    kept, _ = _valid(terms, round, Step.REVEAL, messages, lengths, same)
    shares = {i: _shares_in(m.body[len(same) :], owners[i]) for i, m in sorted(kept.items())}
    revealed = tuple(i for i, found in shares.items() if all(map(shamir.is_share, found.values())))
    _enough(terms, revealed, "clients who revealed")
    if lonely := pool.keys.graph.lonely(pool.members, revealed):
        text = f"too few revealed shares of client {lonely[0]}'s secrets: the round is void"
        raise VoidError(text, members=revealed)
    total = masked.total.copy()
    weights = lru_cache(maxsize=1)(shamir.weights)  # on the complete graph all have the same holders
    for owner in pool.members:
        held = {h: shares[h][owner] for h in pool.keys.graph.holders(owner, revealed)}
        holders = tuple(held)[: terms.shape.shares]
        secret = shamir.combine({h: held[h] for h in holders}, weights(holders))
        remove = _self_mask_removed if owner in masked.survivors else _pair_masks_removed
        if secret is None or not remove(terms, masked, owner, secret, total):
            raise _misfit(terms, owner, held, secret, alive=owner in masked.survivors)
    return total


def _misfit(
    terms: SumTerms, owner: int, held: Mapping[int, bytes], secret: bytes | None, *, alive: bool
) -> VoidError:
    """Whoever reveals a wrong share makes another's secret wrong, so that its owner is named only if it dealt it:
    all shares belong together, and t of them are honest clients', whatever the c colluders say."""
    t, first = terms.shape.shares, tuple(held)[: terms.shape.shares - 1]
    others = [(*first, other) for other in tuple(held)[t:]]
    alike = (shamir.combine({h: held[h] for h in some}, shamir.weights(some)) == secret for some in others)
    if secret is None or len(held) < t + terms.colluders or not all(alike):
        text = "somebody's secret is not the one it committed to, or others revealed wrong shares of it"
        return VoidError(f"{text}; whose fault it is cannot be told: the round is void")
    what = "seed is not the one it committed to" if alive else "mask key is not the one it published"
    return VoidError(f"client {owner}'s {what}: the round is void", owner)


def _self_mask_removed(terms: SumTerms, masked: Masked, owner: int, seed: bytes, total: masks.Words) -> bool:
    """Whether the seed is the one that its owner committed to; its mask is then taken away."""
    keys = masked.pool.keys
    if masks.commitment(seed) != keys.messages[owner].body[2 * wire.KEY : 3 * wire.KEY]:
        return False
    masks.add_stream(total, masks.self_key(seed, terms, keys.round, owner), -1)
    return True


def _pair_masks_removed(terms: SumTerms, masked: Masked, owner: int, private: bytes, total: masks.Words) -> bool:
    """Whether the key is the one that its owner published; its masks with survivors are then taken away."""
    keys = masked.pool.keys
    if masks.public_key(private) != keys.messages[owner].body[: wire.KEY]:
        return False
    for survivor in keys.graph.peers(owner, masked.survivors):
        public = keys.messages[survivor].body[: wire.KEY]
        key = masks.pair_key(private, terms, keys.round, owner, survivor, public)
        masks.add_stream(total, key, -1 if survivor < owner else 1)
    return True


def _shares_in(body: bytes, owners: tuple[int, ...]) -> dict[int, bytes]:
    return {owner: body[SHARE * k : SHARE * (k + 1)] for k, owner in enumerate(owners)}


def _valid(
    terms: SumTerms,
    round: int,
    step: Step,
    messages: Iterable[bytes],
    lengths: Mapping[int, int],
    start: bytes = b"",
) -> tuple[dict[int, wire.Message], tuple[str, ...]]:
    """The first valid message of each sender that has a length, and a line for each other one."""
    kept, refused = dict[int, wire.Message](), list[str]()
    for raw in messages:
        try:
            sender = wire.sender_of(raw)
            if sender not in lengths:
                raise ProtocolError(f"{step.name}: nothing is expected of client {sender}")
            message = wire.read(terms, round, step, raw, lengths[sender])
            if step is Step.KEYS:
                wire.check_keys(terms, sender, message.body)
            if not message.body.startswith(start):
                raise ProtocolError(f"{step.name}: client {sender} is not in step with the others")
            if kept.setdefault(message.sender, message).raw != raw:
                raise ProtocolError(f"{step.name}: client {message.sender} sent another message before")
        except ProtocolError as error:
            refused.append(str(error))
    return kept, tuple(refused)


def _enough(terms: SumTerms, members: Iterable[int], what: str, valid: Iterable[int] | None = None) -> None:
    """Too few end the round. `valid`: whose messages were in order, where that is more than those who count."""
    there = tuple(members)
    if len(there) < terms.threshold:
        text = f"{len(there)} {what} are fewer than the threshold {terms.threshold}: the round is void"
        raise VoidError(text, members=there if valid is None else tuple(valid))
