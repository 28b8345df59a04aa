"""Well-formed requests with lies in them, made by a server that knows the protocol: each is refused by name."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from modicum.secure_aggregation import (
    Client,
    MemoryStore,
    ProtocolError,
    SqliteStore,
    Step,
    SumTerms,
    Variant,
    VoidError,
    masks,
    wire,
)
from modicum.secure_aggregation.client import Secrets
from tests.secure_aggregation.players import Round, players, signing_key, terms_for

TERMS = terms_for(6, colluders=1, threshold=4, dimension=4)


def game_for(terms: SumTerms = TERMS) -> Round:
    return Round(terms, players(terms), {i: np.zeros(4, dtype=np.int64) for i in range(6)})


def keys_of(game: Round, members: Collection[int]) -> dict[int, bytes]:
    return {i: game.clients[i].keys(1) for i in members}


def test_keys_without_ones_own() -> None:
    game = game_for()
    bundle = b"".join(m for i, m in keys_of(game, range(6)).items() if i)
    with pytest.raises(ProtocolError, match="lacks this client's own"):
        game.clients[0].shares(1, wire.request(TERMS, 1, Step.SHARES, bundle))


def test_other_keys_in_ones_own_name() -> None:
    """Signed by the client's own key, from a process that forgot: not the keys that it remembers."""
    game = game_for()
    messages = keys_of(game, range(6))
    messages[0] = wire.sign(TERMS, 1, Step.KEYS, 0, Secrets.fresh().public(), signing_key(0))
    with pytest.raises(ProtocolError, match="lacks this client's own"):
        game.clients[0].shares(1, wire.request(TERMS, 1, Step.SHARES, b"".join(messages.values())))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 3), (1, 0, 2, 3), (0, 0, 0, 0)])
def test_keys_twice_or_out_of_order(order: tuple[int, ...]) -> None:
    game = game_for()
    messages = keys_of(game, range(6))
    bundle = b"".join(messages[i] for i in order)
    with pytest.raises(ProtocolError, match="out of order or appear twice"):
        game.clients[0].shares(1, wire.request(TERMS, 1, Step.SHARES, bundle))


def test_too_few_keys() -> None:
    game = game_for()
    bundle = b"".join(keys_of(game, range(3)).values())
    with pytest.raises(ProtocolError, match="fewer than the threshold"):
        game.clients[0].shares(1, wire.request(TERMS, 1, Step.SHARES, bundle))


def test_a_key_that_leaks_the_agreed_secret() -> None:
    """A colluder publishes a point of small order: every shared secret with it would be zero."""
    game = game_for()
    messages = keys_of(game, range(6))
    messages[5] = wire.sign(TERMS, 1, Step.KEYS, 5, bytes(96), signing_key(5))
    with pytest.raises(ProtocolError, match="a key that gives no secret"):
        game.clients[0].shares(1, wire.request(TERMS, 1, Step.SHARES, b"".join(messages.values())))


LIES = [
    ({1, 2, 3, 4}, "not in them"),  # without the client itself
    ({0, 1, 2, 3, 5}, "not among those who went before"),  # with somebody who never shared
    ({0, 1, 2}, "fewer than the threshold"),
    (set(), "not in them"),
]


@pytest.mark.parametrize(("chosen", "why"), LIES)
@pytest.mark.parametrize("variant", list(Variant))
def test_survivors_who_cannot_be(chosen: set[int], why: str, variant: Variant) -> None:
    terms = terms_for(6, colluders=1, threshold=4, dimension=4, variant=variant)
    game = game_for(terms)
    game.gone = {Step.SHARES: (5,)}
    game.until_masked()
    step = Step.CONSENT if variant is Variant.SIGNED_SURVIVORS else Step.REVEAL
    request = wire.request(terms, 1, step, wire.write_set(terms, chosen))
    ask = game.clients[0].consent if variant is Variant.SIGNED_SURVIVORS else game.clients[0].reveal
    with pytest.raises(ProtocolError, match=why):
        ask(1, request)


def consents(game: Round, chosen: Collection[int], signers: Collection[int]) -> list[bytes]:
    """Signatures over one set; colluders sign whatever they are asked to."""
    name = game.clients[0]._held(1)[0]
    body = name + wire.write_set(TERMS, chosen)
    return [wire.sign(TERMS, 1, Step.CONSENT, i, body, signing_key(i)) for i in signers]


@pytest.mark.parametrize(
    ("signers", "why"),
    [
        ((0, 1, 2, 3, 5), "no survivor"),
        ((0, 1, 2), "fewer than the threshold"),
        ((1, 1, 1, 1), "appear twice"),
        ((), "fewer than the threshold"),
    ],
)
def test_signatures_that_do_not_count(signers: tuple[int, ...], why: str) -> None:
    game = game_for()
    game.until_masked()
    chosen = (0, 1, 2, 3, 4)
    client = game.clients[0]
    client.consent(1, wire.request(TERMS, 1, Step.CONSENT, wire.write_set(TERMS, chosen)))
    bundle = b"".join(consents(game, chosen, signers))
    with pytest.raises(ProtocolError, match=why):
        client.reveal(1, wire.request(TERMS, 1, Step.REVEAL, bundle))
    good = b"".join(consents(game, chosen, (0, 1, 2, 3)))
    assert client.reveal(1, wire.request(TERMS, 1, Step.REVEAL, good))


def test_signatures_over_a_set_that_this_client_did_not_sign() -> None:
    game = game_for()
    game.until_masked()
    client = game.clients[0]
    bundle = b"".join(consents(game, (0, 1, 2, 3), (0, 1, 2, 3)))
    with pytest.raises(ProtocolError, match="asked before this client has answered CONSENT"):
        client.reveal(1, wire.request(TERMS, 1, Step.REVEAL, bundle))
    client.consent(1, wire.request(TERMS, 1, Step.CONSENT, wire.write_set(TERMS, range(6))))
    with pytest.raises(ProtocolError, match="different survivors"):
        client.reveal(1, wire.request(TERMS, 1, Step.REVEAL, bundle))


def test_sealed_shares_are_for_one_way_of_one_pair_in_one_round() -> None:
    mine, theirs = masks.new_key(), masks.new_key()
    public = masks.public_key(theirs), masks.public_key(mine)
    sealed = masks.seal_shares(mine, public[0], TERMS, 1, 0, 1, bytes(66))
    assert masks.open_shares(theirs, public[1], TERMS, 1, 0, 1, sealed) == bytes(66)
    other = terms_for(6, colluders=1, threshold=4, dimension=5)
    for terms, round, sender, receiver in ((TERMS, 2, 0, 1), (TERMS, 1, 1, 0), (TERMS, 1, 0, 2), (other, 1, 0, 1)):
        with pytest.raises(ProtocolError, match="not sealed by it"):
            masks.open_shares(theirs, public[1], terms, round, sender, receiver, sealed)
    for wrong in (b"\xff" * 66, bytes(65), bytes(67)):
        sealed = masks.seal_shares(mine, public[0], TERMS, 1, 0, 1, wrong)
        with pytest.raises(ProtocolError, match="no pair of shares"):
            masks.open_shares(theirs, public[1], TERMS, 1, 0, 1, sealed)


class WrongMaskShares(Client):
    """A hostile client: honest about survivors, wrong about those who dropped out."""

    def _held(self, round: int):  # type: ignore[no-untyped-def]
        name, pool, held = super()._held(round)
        return name, pool, {i: bytes(33) + both[33:] for i, both in held.items()}


def test_a_wrong_mask_key_makes_the_round_void() -> None:
    game = game_for()
    game.clients = dict(game.clients) | {0: WrongMaskShares(TERMS, 0, signing_key(0), MemoryStore())}
    game.gone = {Step.MASKED: (5,)}
    with pytest.raises(
        VoidError, match=r"(mask key is not the one it published|whose fault it is cannot be told)"
    ):
        game.play()


class OneStoreForAllTerms(Client):
    """The mutant takes what its store holds, whatever terms it was said under."""

    def _header(self, round: int, step: Step) -> bytes:
        return b""


WEAKER = terms_for(6, threshold=2, dimension=4, variant=Variant.HONEST_BUT_CURIOUS)


def asked_under_weaker_terms(kind: type[Client]) -> bytes:
    """Client 0 masked its input under TERMS; then the server asks it to reveal under those of another cohort."""
    game = game_for()
    stores = {i: MemoryStore() for i in range(6)}
    game.clients = {i: kind(TERMS, i, signing_key(i), stores[i]) for i in range(6)}
    game.until_masked()
    other = kind(WEAKER, 0, signing_key(0), stores[0])
    return other.reveal(1, wire.request(WEAKER, 1, Step.REVEAL, wire.write_set(WEAKER, (0, 1))))


def test_shares_are_not_revealed_under_other_terms() -> None:
    """Two cohorts of a run, one store: the second's lower threshold opens nothing of the first's round."""
    with pytest.raises(ProtocolError, match="under other terms"):
        asked_under_weaker_terms(Client)


def test_a_client_that_reveals_under_other_terms_is_caught() -> None:
    """The mutant hands out its shares of four mask keys and two seeds on the word of a server."""
    revealed = asked_under_weaker_terms(OneStoreForAllTerms)
    assert len(wire.read(WEAKER, 1, Step.REVEAL, revealed, wire.DIGEST + 1 + 6 * 33).body) == 32 + 1 + 6 * 33


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 63, 1 << 70])
def test_a_round_that_no_store_can_hold(number: int, tmp_path: Path) -> None:
    """SQLite raises an error of its own beyond 63 bits; a server must not be able to stop a client with it."""
    with closing(SqliteStore(tmp_path / "store", TERMS.run, TERMS.keys[0])) as store:
        client = Client(TERMS, 0, signing_key(0), store)
        for ask in (client.keys, lambda r: client.shares(r, b""), lambda r: client.reveal(r, b"")):
            with pytest.raises(ProtocolError, match="round's number"):
                ask(number)
        if number >= 1 << 63:  # the mutant without the check
            with pytest.raises(OverflowError):
                store.read(number, Step.KEYS)
