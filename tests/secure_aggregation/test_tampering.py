"""Tampered, replayed, missing, forged and reordered messages: refused or void, never a wrong sum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from modicum.secure_aggregation import (
    Masked,
    MemoryStore,
    ProtocolError,
    Step,
    SumTerms,
    Variant,
    VoidError,
    masks,
    shamir,
    wire,
)
from modicum.secure_aggregation.client import Client, Secrets
from modicum.secure_aggregation.masks import SMALL_ORDER
from tests.secure_aggregation.players import (
    NoSecret,
    Ring,
    Round,
    drawn,
    players,
    random_inputs,
    signing_key,
    terms_for,
)

STEPS = tuple(Step)
VICTIM = 2


def game_for(terms: SumTerms, number: int = 1) -> Round:
    return Round(terms, players(terms), random_inputs(terms, np.random.default_rng(number)), number)


def exact_or_void(game: Round) -> bool:
    """Play; the sum is right, or there is none. True if there is one."""
    try:
        total = game.play()
    except VoidError:
        return False
    np.testing.assert_array_equal(total, game.true_sum())
    return True


def flip(message: bytes, rng: np.random.Generator) -> bytes:
    spoiled = bytearray(message)
    spoiled[int(rng.integers(len(message)))] ^= 1 << int(rng.integers(8))
    return bytes(spoiled)


def forge(terms: SumTerms, step: Step, message: bytes) -> bytes:
    """The same contents, signed by a key that is not the sender's."""
    body = message[wire.HEADER.size : -wire.SIGNATURE]
    return wire.sign(terms, 1, step, VICTIM, body, signing_key(77))


SPOILS: dict[str, Callable[[SumTerms, Step, bytes, np.random.Generator], list[bytes]]] = {
    "flipped": lambda _t, _s, m, rng: [flip(m, rng)],
    "cut": lambda _t, _s, m, rng: [m[: int(rng.integers(len(m)))]],
    "longer": lambda _t, _s, m, _rng: [m + b"\0"],
    "missing": lambda _t, _s, _m, _rng: [],
    "empty": lambda _t, _s, _m, _rng: [b""],
    "forged": lambda t, s, m, _rng: [forge(t, s, m)],
    "random": lambda _t, _s, m, rng: [rng.bytes(len(m))],
}


GRAPHS = {"complete": SumTerms, "drawn": drawn(3, 2)}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_one_spoiled_message_is_a_dropout(graph: str, step: Step, spoil: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(4 if graph == "complete" else 1):
        terms = terms_for(5, GRAPHS[graph], colluders=1, dimension=4)
        game = game_for(terms)
        game.carry = lambda s, i, m: (
            SPOILS[spoil](terms, s, m, rng)  # noqa: B023
            if (s, i) == (step, VICTIM)
            else [m]
        )
        assert exact_or_void(game)
        assert (VICTIM in game.survivors) == (step > Step.MASKED)


@pytest.mark.parametrize("step", STEPS)
def test_too_many_spoiled_messages_make_the_round_void(step: Step) -> None:
    rng = np.random.default_rng(4)
    game = game_for(terms_for(5, colluders=1, dimension=4))
    game.carry = lambda s, i, m: [flip(m, rng)] if s is step and i < 2 else [m]
    assert not exact_or_void(game)


@pytest.mark.parametrize("step", STEPS)
def test_replayed_from_another_round_run_or_sender(step: Step) -> None:
    terms = terms_for(5, colluders=1, dimension=4)
    other_run = terms_for(5, colluders=1, dimension=4, run="run-0")
    earlier, elsewhere = game_for(terms, 1), game_for(other_run, 2)
    assert exact_or_void(earlier)
    assert exact_or_void(elsewhere)
    for source in (earlier.seen[step][VICTIM], elsewhere.seen[step][VICTIM]):
        game = Round(terms, players(terms), earlier.inputs, 2)
        game.carry = lambda s, i, m, source=source: [source] if (s, i) == (step, VICTIM) else [m]
        assert exact_or_void(game)
    game = game_for(terms, 2)
    game.carry = lambda s, i, m: [game.seen[s][1]] if (s, i) == (step, VICTIM) else [m]
    assert exact_or_void(game)
    game = game_for(terms, 2)
    game.carry = lambda s, _i, m: [m, m] if s is step else [m]  # everything twice
    assert exact_or_void(game)
    assert len(game.survivors) == 5


@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.parametrize("graph", GRAPHS)
def test_spoiled_requests_are_refused(graph: str, step: Step) -> None:
    """What the server, or somebody on the way, asks of one client: bits flipped, cut, longer, another client's."""
    rng = np.random.default_rng(5)
    terms = terms_for(5, GRAPHS[graph], colluders=1, dimension=4)
    for spoil in (
        lambda q: flip(q, rng),
        lambda q: q[: int(rng.integers(len(q)))],
        lambda q: q + b"\0",
        lambda _q: b"",
    ):
        for _ in range(4 if graph == "complete" else 1):
            game = game_for(terms)
            game.deliver = lambda s, i, q, spoil=spoil: spoil(q) if (s, i) == (step, VICTIM) else q
            assert exact_or_void(game)
    if step is Step.MASKED:  # shares sealed for somebody else
        game = game_for(terms)
        kept: dict[int, bytes] = {}

        def swap(s: Step, i: int, q: bytes) -> bytes:
            if s is Step.MASKED:
                kept[i] = q
            return kept[0] if (s, i) == (step, VICTIM) else q

        game.deliver = swap
        assert exact_or_void(game)
        assert VICTIM not in game.survivors


def test_clients_shown_different_pools() -> None:
    """One client masks against fewer peers than the others: it is a dropout, not a wrong sum."""
    terms = terms_for(6, colluders=1, dimension=4)
    game = game_for(terms)

    def narrower(s: Step, i: int, q: bytes) -> bytes:
        if (s, i) != (Step.MASKED, VICTIM):
            return q
        body, size = q[wire.HEADER.size :], wire.set_bytes(terms)
        sealed = body[size:]
        last = len(sealed) // 5
        return wire.request(terms, 1, s, wire.write_set(terms, range(5)) + sealed[: 4 * last])

    game.deliver = narrower
    assert exact_or_void(game)
    assert VICTIM not in game.survivors
    assert Step.MASKED in game.seen
    assert VICTIM in game.seen[Step.MASKED]  # it did answer


class WrongShares(Client):
    """A hostile client: reveals shares of its own making."""

    def _held(self, round: int):  # type: ignore[no-untyped-def]
        name, pool, held = super()._held(round)
        return name, pool, {i: bytes(66) for i in held}


def test_wrong_shares_make_the_round_void() -> None:
    terms = terms_for(5, colluders=1, dimension=4)
    game = game_for(terms)
    game.clients = dict(game.clients) | {0: WrongShares(terms, 0, signing_key(0), MemoryStore())}
    with pytest.raises(VoidError, match="void"):
        game.play()


class WrongOfAnother(Client):
    """A hostile client: what it reveals of client 1's secrets is not what client 1 dealt it."""

    def _held(self, round: int):  # type: ignore[no-untyped-def]
        name, pool, held = super()._held(round)
        return name, pool, {**held, 1: bytes(66)}


class OtherSeed(Client):
    """A hostile client: deals shares of another seed than it committed to."""

    def _new_secrets(self, round: int) -> Secrets:
        return Uncommitted.fresh()


class Uncommitted(Secrets):
    def public(self) -> bytes:
        return super().public()[:-32] + bytes(32)


@pytest.mark.parametrize(("kind", "index"), [(WrongOfAnother, 0), (OtherSeed, 1)])
@pytest.mark.parametrize("gone", [(), (1,), (4,)])
def test_nobody_is_named_for_what_another_did(kind: type[Client], index: int, gone: tuple[int, ...]) -> None:
    """Client 1 is named where it lied and t + c shares show it; a wrong share of its secret does not."""
    terms = terms_for(5, colluders=1, dimension=4)
    game = game_for(terms)
    game.clients = dict(game.clients) | {index: kind(terms, index, signing_key(index), MemoryStore())}
    game.gone = {Step.MASKED: gone} if kind is WrongOfAnother else {Step.REVEAL: gone}
    with pytest.raises(VoidError, match="round is void") as void:
        game.play()
    assert void.value.client == (1 if kind is OtherSeed and gone == () else None)


def test_without_the_commitment_wrong_shares_would_make_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the check above: a server that compares nothing opens garbage."""
    from modicum.secure_aggregation import server

    terms = terms_for(5, colluders=1, dimension=4)
    game = game_for(terms)
    game.clients = dict(game.clients) | {0: WrongShares(terms, 0, signing_key(0), MemoryStore())}
    monkeypatch.setattr(shamir, "combine", lambda shares, weights: _combine_any(shares, weights))

    def removed_unseen(terms: SumTerms, masked: Masked, owner: int, seed: bytes, total: masks.Words) -> bool:
        masks.add_stream(total, masks.self_key(seed, terms, masked.pool.keys.round, owner), -1)
        return True

    monkeypatch.setattr(server, "_self_mask_removed", removed_unseen)
    assert not np.array_equal(game.play(), game.true_sum())


def _combine_any(shares: dict[int, bytes], weights: dict[int, int]) -> bytes:
    value = sum(int.from_bytes(shares[h], "little") * w for h, w in weights.items()) % shamir.PRIME
    return (value % 2**256).to_bytes(32, "little")


def test_questions_out_of_order() -> None:
    terms = terms_for(3)
    (client, *_) = players(terms).values()
    vector = np.zeros(terms.dimension, dtype=np.int64)
    for ask in (
        lambda: client.shares(1, wire.request(terms, 1, Step.SHARES, b"")),
        lambda: client.masked(1, wire.request(terms, 1, Step.MASKED, b""), vector),
        lambda: client.consent(1, wire.request(terms, 1, Step.CONSENT, b"\7")),
        lambda: client.reveal(1, wire.request(terms, 1, Step.REVEAL, b"\7")),
    ):
        with pytest.raises(ProtocolError, match="asked before"):
            ask()
    client.keys(5)
    for old in (4, 0):
        with pytest.raises(ProtocolError, match="is over"):
            client.keys(old)
    with pytest.raises(ProtocolError, match="number"):
        client.keys(2**32)


@pytest.mark.parametrize("variant", list(Variant))
def test_a_finished_round_stays_finished(variant: Variant) -> None:
    """Repeats get the same bytes; anything else, and another input, get nothing."""
    terms = terms_for(4, variant=variant)
    game = game_for(terms)
    requests: dict[tuple[Step, int], bytes] = {}

    def note(s: Step, i: int, q: bytes) -> bytes:
        requests[s, i] = q
        return q

    game.deliver = note
    assert exact_or_void(game)
    client = game.clients[0]
    other = np.ones(terms.dimension, dtype=np.int64)
    assert client.masked(1, requests[Step.MASKED, 0], other) == game.seen[Step.MASKED][0]
    assert client.reveal(1, requests[Step.REVEAL, 0]) == game.seen[Step.REVEAL][0]
    assert client.keys(1) == game.seen[Step.KEYS][0] == client.said(1, Step.KEYS)
    for step, ask in (
        (Step.SHARES, lambda q: client.shares(1, q)),
        (Step.MASKED, lambda q: client.masked(1, q, other)),
        (Step.REVEAL, lambda q: client.reveal(1, q)),
    ):
        with pytest.raises(ProtocolError, match="another request"):
            ask(requests[step, 0] + b"\0")
    assert all(not e.state for (r, _), e in client._store._entries.items() if r == 1)  # type: ignore[attr-defined]


def test_an_abandoned_round_reveals_nothing() -> None:
    """Void on the client's side: secrets are gone, also for a server that finds enough survivors after all."""
    terms = terms_for(4)
    game = game_for(terms)
    masked = game.until_masked()
    for client in game.clients.values():
        client.abandon(1)
        client.abandon(1)
        assert all(not e.state for (r, _), e in client._store._entries.items() if r == 1)  # type: ignore[attr-defined]
        with pytest.raises(ProtocolError, match="destroyed"):
            client.consent(1, masked.request)
        with pytest.raises(ProtocolError, match="already answered"):
            client.reveal(1, wire.request(terms, 1, Step.REVEAL, b""))
    with pytest.raises(VoidError):
        game.finish(masked)
    assert exact_or_void(Round(terms, game.clients, game.inputs, 2))


def test_reading_random_bytes_raises_nothing_else() -> None:
    """Parsers answer noise with `ProtocolError` and no other error; 3,000 tries, headers right in half of them."""
    rng = np.random.default_rng(6)
    terms = terms_for(5, colluders=1, dimension=4)
    vector = np.zeros(4, dtype=np.int64)
    game = game_for(terms)
    game.until_masked()
    fresh = players(terms)[3]
    fresh.keys(1)
    for k in range(3000):
        junk = rng.bytes(int(rng.integers(0, 400)))
        step = STEPS[1:][k % 4]
        question = wire.request(terms, 1, step, junk) if k % 2 else junk
        client = fresh if step <= Step.MASKED else game.clients[3]
        ask = {
            Step.SHARES: lambda q: client.shares(1, q),  # noqa: B023
            Step.MASKED: lambda q: client.masked(1, q, vector),  # noqa: B023
            Step.CONSENT: lambda q: client.consent(1, q),  # noqa: B023
            Step.REVEAL: lambda q: client.reveal(1, q),  # noqa: B023
        }
        with pytest.raises(ProtocolError):
            ask[step](question)


class WithoutSecret(Ring):
    """Publishes a mask key of small order."""

    def _new_secrets(self, round: int) -> NoSecret:
        return NoSecret.fresh()  # type: ignore[return-value]


def test_a_mask_key_of_small_order_is_a_dropout() -> None:
    """Nobody masks against it, and nobody's masks have to be taken away from its input.

    Beyond its neighbourhood nobody would meet the key before the server does, when it opens the sum.
    """
    terms = terms_for(12, drawn(2, 1), colluders=1, dimension=4)
    clients = players(terms, Ring) | {VICTIM: WithoutSecret(terms, VICTIM, signing_key(VICTIM), MemoryStore())}
    game = Round(terms, clients, random_inputs(terms, np.random.default_rng(1)))
    assert exact_or_void(game)
    assert game.survivors == tuple(i for i in range(12) if i != VICTIM)


@pytest.mark.parametrize("point", [*SMALL_ORDER, *(point | 1 << 255 for point in SMALL_ORDER)])
def test_points_of_small_order_are_those_that_give_nothing(point: int) -> None:
    """As the library finds them; the highest bit of a key is not looked at."""
    key = point.to_bytes(32, "little")
    assert not masks.is_key(key)
    with pytest.raises(ProtocolError, match="not one that an honest client makes"):
        masks.pair_key(masks.new_key(), terms_for(3), 1, 0, 1, key)
