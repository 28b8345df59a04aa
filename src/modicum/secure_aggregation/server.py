"""The server: carries messages, adds masked inputs, and takes away the masks that the clients let it take away.

Pure functions. Each keeps what is valid of one step's messages and lists what it refused; a message that is
missing or refused makes its sender a dropout. With fewer than t left there is no sum (`VoidError`), and whatever
is opened is checked against what the clients committed to, so that a sum is exact or there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from modicum.secure_aggregation import masks, shamir, wire
from modicum.secure_aggregation.shamir import SHARE
from modicum.secure_aggregation.terms import ProtocolError, Step, Terms, Variant, VoidError


@dataclass(frozen=True)
class Keys:
    """After KEYS: whose signed keys came, and the request that carries them to all of them."""

    round: int
    messages: Mapping[int, wire.Message]
    request: bytes
    view: bytes
    refused: tuple[str, ...]

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


def gather_keys(terms: Terms, round: int, messages: Iterable[bytes]) -> Keys:
    """The first step: signed keys of all who answer; fewer than the threshold end the round."""
    kept, refused = _valid(terms, round, Step.KEYS, messages, range(terms.clients), wire.KEYS)
    _enough(terms, kept, "signed keys")
    body = wire.bundle(kept.values())
    request = wire.request(terms, round, Step.SHARES, body)
    return Keys(round, dict(sorted(kept.items())), request, wire.view_of(body), refused)


def gather_shares(terms: Terms, keys: Keys, messages: Iterable[bytes]) -> Pool:
    """The second step: sealed shares, passed on to those whom they are for."""
    length = wire.DIGEST + masks.SEALED * (len(keys.members) - 1)
    kept, refused = _valid(terms, keys.round, Step.SHARES, messages, keys.members, length, keys.view)
    members = tuple(sorted(kept))
    _enough(terms, members, "clients who shared")
    sealed = {i: _sealed_by(kept[i], keys.members) for i in members}
    chosen = wire.write_set(terms, members)
    requests = {
        i: wire.request(terms, keys.round, Step.MASKED, chosen + b"".join(sealed[j][i] for j in members if j != i))
        for i in members
    }
    return Pool(keys, members, requests, wire.pool_of(terms, keys.view, members), refused)


def _sealed_by(message: wire.Message, members: tuple[int, ...]) -> dict[int, bytes]:
    peers = [i for i in members if i != message.sender]
    parts = message.body[wire.DIGEST :]
    return {i: parts[k * masks.SEALED : (k + 1) * masks.SEALED] for k, i in enumerate(peers)}


def add_masked(terms: Terms, pool: Pool, messages: Iterable[bytes]) -> Masked:
    """Messages are added as they come and need not be kept."""
    total = np.zeros(terms.dimension, dtype=terms.dtype)
    length = wire.DIGEST + terms.dimension * terms.dtype.itemsize
    survivors: set[int] = set()
    refused: list[str] = []
    for raw in messages:
        kept, why = _valid(terms, pool.keys.round, Step.MASKED, [raw], pool.members, length, pool.name)
        refused += why
        for sender, message in kept.items():
            if sender in survivors:
                refused.append(f"MASKED: client {sender} sent a message before")
                continue
            total += np.frombuffer(message.body, dtype=terms.dtype, offset=wire.DIGEST)
            survivors.add(sender)
    return masked_sum(terms, pool, survivors, total, refused)


def masked_sum(
    terms: Terms, pool: Pool, survivors: Iterable[int], total: masks.Words, refused: Iterable[str] = ()
) -> Masked:
    """Masked inputs that are added up already, such as those that a server wrote down before it died."""
    chosen = tuple(sorted(survivors))
    _enough(terms, chosen, "survivors")
    step = Step.CONSENT if terms.variant is Variant.SIGNED_SURVIVORS else Step.REVEAL
    request = wire.request(terms, pool.keys.round, step, wire.write_set(terms, chosen))
    return Masked(pool, chosen, request, tuple(refused), total)


def gather_consents(terms: Terms, masked: Masked, messages: Iterable[bytes]) -> bytes:
    """The request for REVEAL: the survivors' signatures over their set."""
    same = masked.pool.name + wire.write_set(terms, masked.survivors)
    round = masked.pool.keys.round
    kept, _ = _valid(terms, round, Step.CONSENT, messages, masked.survivors, len(same), same)
    _enough(terms, kept, "signatures over the survivors")
    return wire.request(terms, round, Step.REVEAL, wire.bundle(kept.values()))


def open_sum(terms: Terms, masked: Masked, messages: Iterable[bytes]) -> masks.Words:
    """The exact sum of the survivors' inputs modulo 2^bits."""
    pool, round = masked.pool, masked.pool.keys.round
    same = pool.name + wire.write_set(terms, masked.survivors)
    length = len(same) + SHARE * len(pool.members)
    kept, _ = _valid(terms, round, Step.REVEAL, messages, masked.survivors, length, same)
    holders = sorted(i for i, m in kept.items() if _all_shares(m.body[len(same) :]))
    _enough(terms, holders, "clients who revealed")
    holders = holders[: terms.threshold]
    weights = shamir.weights(holders)
    total = masked.total.copy()
    for k, owner in enumerate(pool.members):
        start = len(same) + SHARE * k
        secret = shamir.combine({h: kept[h].body[start : start + SHARE] for h in holders}, weights)
        if secret is None:
            raise VoidError(
                f"the shares of client {owner}'s secret do not belong together: the round is void", owner
            )
        if owner in masked.survivors:
            _remove_self_mask(terms, pool, owner, secret, total)
        else:
            _remove_pair_masks(terms, masked, owner, secret, total)
    return total


def _remove_self_mask(terms: Terms, pool: Pool, owner: int, seed: bytes, total: masks.Words) -> None:
    if masks.commitment(seed) != pool.keys.messages[owner].body[2 * wire.KEY :]:
        raise VoidError(f"client {owner}'s seed is not the one it committed to: the round is void", owner)
    masks.add_stream(total, masks.self_key(seed, terms, pool.keys.round, owner), -1)


def _remove_pair_masks(terms: Terms, masked: Masked, owner: int, private: bytes, total: masks.Words) -> None:
    keys = masked.pool.keys
    if masks.public_key(private) != keys.messages[owner].body[: wire.KEY]:
        raise VoidError(f"client {owner}'s mask key is not the one it published: the round is void", owner)
    for survivor in masked.survivors:
        public = keys.messages[survivor].body[: wire.KEY]
        key = masks.pair_key(private, terms, keys.round, owner, survivor, public)
        masks.add_stream(total, key, -1 if survivor < owner else 1)


def _all_shares(body: bytes) -> bool:
    return all(shamir.is_share(body[i : i + SHARE]) for i in range(0, len(body), SHARE))


def _valid(
    terms: Terms,
    round: int,
    step: Step,
    messages: Iterable[bytes],
    senders: Iterable[int],
    length: int,
    start: bytes = b"",
) -> tuple[dict[int, wire.Message], tuple[str, ...]]:
    """The first valid message of each allowed sender, and a line for each other one."""
    allowed, kept, refused = set(senders), dict[int, wire.Message](), list[str]()
    for raw in messages:
        try:
            message = wire.read(terms, round, step, raw, length)
            if message.sender not in allowed or not message.body.startswith(start):
                raise ProtocolError(f"{step.name}: client {message.sender} is not in step with the others")
            if kept.setdefault(message.sender, message).raw != raw:
                raise ProtocolError(f"{step.name}: client {message.sender} sent another message before")
        except ProtocolError as error:
            refused.append(str(error))
    return kept, tuple(refused)


def _enough(terms: Terms, members: Iterable[int], what: str) -> None:
    there = tuple(members)
    if len(there) < terms.threshold:
        text = f"{len(there)} {what} are fewer than the threshold {terms.threshold}: the round is void"
        raise VoidError(text, members=there)
