"""What a hostile server with c colluders sees looks uniform; every negative control gives an input away."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from modicum.secure_aggregation import (
    Client,
    MemoryStore,
    ProtocolError,
    Step,
    SumTerms,
    Variant,
    VoidError,
    masks,
    wire,
)
from modicum.secure_aggregation.client import Secrets
from tests.secure_aggregation.adversary import Adversary, share_of, spy, uniform
from tests.secure_aggregation.players import Ring, Round, drawn, players, signing_key, terms_for

SIZE = 4096  # words of an input: 16 kB, enough for a chi-square over bytes


def zeros(terms: SumTerms) -> dict[int, np.ndarray]:
    """Inputs that look least uniform once their masks are gone."""
    return {i: np.full(terms.dimension, i + 1) for i in range(terms.clients)}


GRAPHS: dict[str, type[SumTerms]] = {"complete": SumTerms, "drawn": drawn(3, 3)}
COLLUDERS = (4, 5)


def plain_terms(graph: str = "complete", **changes: object) -> SumTerms:
    """Six clients, two colluders; the drawn graph has neighbourhoods of four, three of whom open a secret."""
    return terms_for(6, GRAPHS[graph], **({"colluders": 2, "dimension": SIZE} | changes))


def ring(terms: SumTerms, kind: type[Client] = Ring) -> dict[int, Client]:
    return players(terms, kind)


def watched_round(
    terms: SumTerms,
    clients: dict[int, Client],
    enemy: Adversary,
    number: int = 1,
    declared_gone: tuple[int, ...] = (),
) -> Round:
    """A round whose server reports some masked inputs as lost, though it has them."""
    game = Round(terms, clients, zeros(terms), number)
    game.carry = lambda step, sender, m: [] if step is Step.MASKED and sender in declared_gone else [m]
    masked = game.until_masked()
    spy(game, enemy.colluders)
    game.finish(masked)
    enemy.watch(game)
    return game


HONEST = (0, 1, 2, 3)


@pytest.mark.parametrize("gone", [(), (0,)])
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("graph", GRAPHS)
def test_honest_inputs_look_uniform(graph: str, gone: tuple[int, ...], bits: int) -> None:
    """Alone, in pairs and in threes; also of a client whom the server declares lost: its own mask stays."""
    terms = plain_terms(graph, bits=bits)
    clients, enemy = ring(terms), Adversary(terms, COLLUDERS)
    game = watched_round(terms, clients, enemy, declared_gone=gone)
    for k in (1, 2, 3):
        for start in range(4):
            victims = {HONEST[(start + j) % 4] for j in range(k)}
            if victims != set(HONEST) - set(gone):
                assert uniform(enemy.residual(game, victims))
    everyone = enemy.residual(game, set(HONEST) - set(gone))
    assert set(everyone) == {
        sum(i + 1 for i in HONEST if i not in gone)
    }  # the adversary is no weaker than it may be


@pytest.mark.parametrize("graph", GRAPHS)
def test_rounds_have_nothing_in_common(graph: str) -> None:
    terms = plain_terms(graph)
    clients, enemy = ring(terms), Adversary(terms, COLLUDERS)
    first = watched_round(terms, clients, enemy, 1)
    second = watched_round(terms, clients, enemy, 2, declared_gone=(1,))
    for i in HONEST:
        assert uniform(enemy.residual(first, {i}) - enemy.residual(second, {i}))


@pytest.mark.parametrize("graph", GRAPHS)
def test_masks_used_again_are_caught(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant has the same keys in every round, and streams that do not depend on the round."""
    derive = masks._derive
    monkeypatch.setattr(
        masks, "_derive", lambda purpose, secret, terms, _round, *names: derive(purpose, secret, terms, 0, *names)
    )
    terms = plain_terms(graph)
    clients, enemy = ring(terms, fixed_secrets(mask=True, seed=True)), Adversary(terms, COLLUDERS)
    first = watched_round(terms, clients, enemy, 1)
    second = watched_round(terms, clients, enemy, 2)
    assert not uniform(enemy.residual(first, {0}) - enemy.residual(second, {0}))


def fixed_secrets(*, mask: bool = False, seed: bool = False) -> type[Client]:
    kept: dict[int, Secrets] = {}

    class RunLong(Ring):
        def _new_secrets(self, round: int) -> Secrets:
            new = Secrets.fresh()
            old = kept.setdefault(self.index, new)
            return Secrets(old.mask if mask else new.mask, new.share, old.seed if seed else new.seed)

    return RunLong


@pytest.mark.parametrize("kind", [Ring, fixed_secrets(mask=True)])
@pytest.mark.parametrize("graph", GRAPHS)
def test_survive_round_1_drop_in_round_2(graph: str, kind: type[Client]) -> None:
    """Recovering somebody who dropped out reveals nothing of earlier rounds; run-long mask keys would."""
    terms = plain_terms(graph)
    clients, enemy = ring(terms, kind), Adversary(terms, COLLUDERS)
    first = watched_round(terms, clients, enemy, 1)
    assert uniform(enemy.residual(first, {0}))
    watched_round(terms, clients, enemy, 2, declared_gone=(0,))
    left = enemy.residual(first, {0})
    if kind is Ring:
        assert uniform(left)
    else:
        assert set(left) == {1}


class Forgetful(MemoryStore):
    """Loses what was revealed, as a client without a durable store would in a crash."""

    def write(self, round, step, entry, *, erase=False):  # type: ignore[no-untyped-def]
        del erase
        if step is not Step.REVEAL:
            super().write(round, step, entry)


@pytest.mark.parametrize("store", [MemoryStore, Forgetful])
@pytest.mark.parametrize("graph", GRAPHS)
def test_both_shares_revealed(graph: str, store: type[MemoryStore]) -> None:
    """A server that asks twice, with and without client 0 among the survivors, even if it may show any set."""
    terms = plain_terms(graph, variant=Variant.HONEST_BUT_CURIOUS, threshold=5)
    clients = {i: Ring(terms, i, signing_key(i), store()) for i in range(6)}
    enemy = Adversary(terms, COLLUDERS)
    game = Round(terms, clients, zeros(terms))
    masked = game.until_masked()
    spy(game, COLLUDERS)
    game.finish(masked)
    without = wire.request(terms, 1, Step.REVEAL, wire.write_set(terms, range(1, 6)))
    more = []
    for i in range(1, 6):
        try:
            more.append(clients[i].reveal(1, without))
        except ProtocolError:
            assert store is MemoryStore
    enemy.watch(game, more)
    assert uniform(enemy.residual(game, {0})) == (store is MemoryStore)


@pytest.mark.parametrize("signatures", [True, False])
@pytest.mark.parametrize("graph", GRAPHS)
def test_keys_that_the_server_made(graph: str, signatures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server shows client 0 its own keys in place of everybody else's; the mutant looks at no signature."""
    terms = plain_terms(graph)
    clients = ring(terms)
    if not signatures:
        monkeypatch.setattr(wire, "read", read_unsigned)
    fakes = {i: Secrets.fresh() for i in range(1, 6)}
    forger = signing_key(99)
    bundle = clients[0].keys(1)
    for i, fake in fakes.items():
        names = wire.write_set(terms, clients[i]._draw()) if terms.sparse else b""
        bundle += wire.sign(terms, 1, Step.KEYS, i, fake.public() + names, forger)
    request = wire.request(terms, 1, Step.SHARES, bundle)
    if signatures:
        with pytest.raises(ProtocolError, match="signature"):
            clients[0].shares(1, request)
        return
    shared = clients[0].shares(1, request)
    enemy = Adversary(terms, ())
    own = bundle[wire.HEADER.size : wire.HEADER.size + 96]
    held = {}
    for k, (i, fake) in enumerate(list(fakes.items())[: terms.shape.neighbours]):
        start = wire.HEADER.size + wire.DIGEST + k * masks.SEALED
        sealed = shared[start : start + masks.SEALED]
        held[i] = masks.open_shares(fake.share, own[32:64], terms, 1, 0, i, sealed)
    for secret in ("mask", "seed"):
        enemy.learn(own, secret, {i: share_of(secret, both) for i, both in held.items()})
    assert own[:32] in enemy.mask_keys
    assert own[64:] in enemy.seeds


def read_unsigned(terms: SumTerms, round: int, step: Step, message: bytes, length: int) -> wire.Message:
    del terms, round, step, length
    sender = wire.HEADER.unpack_from(message)[-1]
    return wire.Message(sender, message[wire.HEADER.size : -wire.SIGNATURE], message)


class ShortSeeds(Ring):
    """32 bits of seed, as numpy's generators like them."""

    def _new_secrets(self, round: int) -> Secrets:
        return replace(super()._new_secrets(round), seed=os.urandom(4) + bytes(28))


@pytest.mark.parametrize(("graph", "kind"), [("complete", Ring), ("complete", ShortSeeds), ("drawn", ShortSeeds)])
def test_seeds_have_256_bits(graph: str, kind: type[Client]) -> None:
    """Every byte of every seed that the server learns is uniform."""
    terms = plain_terms(graph, dimension=1)
    clients, enemy = ring(terms, kind), Adversary(terms, COLLUDERS)
    for number in range(1, 21):
        watched_round(terms, clients, enemy, number)
    seeds = b"".join(enemy.seeds.values())
    assert len(seeds) == 20 * 6 * 32
    assert uniform(np.frombuffer(seeds, dtype=np.uint8)) == (kind is Ring)


VIEWS = {0: {2, 3, 4, 5}, 1: {5, 6, 7, 8}} | {2 + j: {2 + (j + k) % 7 for k in range(1, 5)} for j in range(7)}
"""Whom each of nine clients is told to have dropped out: nobody drops more than 4 of 10, yet all of 2…8 are
dropped by five clients or more, and 0 and 1 by none."""


@pytest.mark.parametrize("variant", list(Variant))
def test_different_survivors_for_different_clients(variant: Variant) -> None:
    """P = 10, t = 6, c = 1: trusting the server's sets lets it open the sum of two; signatures do not."""
    terms = terms_for(10, colluders=1, threshold=6, variant=variant, dimension=SIZE)
    clients, enemy = ring(terms), Adversary(terms, (9,))
    game = Round(terms, clients, zeros(terms))
    game.until_masked()
    spy(game, (9,))
    step = Step.CONSENT if variant is Variant.SIGNED_SURVIVORS else Step.REVEAL
    sets = {i: wire.write_set(terms, set(range(10)) - gone) for i, gone in VIEWS.items()}
    requests = {i: wire.request(terms, 1, step, chosen) for i, chosen in sets.items()}
    reveals = []
    if variant is Variant.HONEST_BUT_CURIOUS:
        reveals = [clients[i].reveal(1, q) for i, q in requests.items()]
    else:
        signed = {i: clients[i].consent(1, q) for i, q in requests.items()}
        everything = wire.request(terms, 1, Step.REVEAL, b"".join(signed[i] for i in sorted(signed)))
        for i in range(9):
            with pytest.raises(ProtocolError, match="different survivors"):
                clients[i].reveal(1, everything)
            with pytest.raises(ProtocolError, match="fewer than the threshold"):
                clients[i].reveal(1, wire.request(terms, 1, Step.REVEAL, signed[i]))
            with pytest.raises(ProtocolError, match="another request"):
                clients[i].consent(1, wire.request(terms, 1, step, wire.write_set(terms, range(10))))
    enemy.watch(game, reveals)
    opened = enemy.residual(game, {0, 1})
    if variant is Variant.HONEST_BUT_CURIOUS:
        assert set(opened) == {1 + 2}
        assert terms.honest == 5  # more than the two whose sum was opened: the variant's name is a warning
    else:
        assert uniform(opened)


@pytest.mark.parametrize("graph", [SumTerms, drawn(6, 4)])
def test_noise_is_counted_for_the_smallest_sum_that_can_be_opened(graph: type[SumTerms]) -> None:
    """t survivors with all colluders among them: t − c honest inputs are in the sum, and not one more."""
    terms = terms_for(9, graph, colluders=2, threshold=6, dimension=8)
    clients = ring(terms)
    inputs = {i: np.full(8, 0 if i >= 7 else 1) for i in range(9)}  # each honest client counts itself
    game = Round(terms, clients, inputs, gone={Step.MASKED: (0, 1, 2)})
    counted = int(game.play()[0])
    assert counted == terms.honest == 4
    mutant = terms.honest + 1
    assert mutant > counted
    with pytest.raises(VoidError, match="fewer than the threshold"):
        Round(terms, clients, inputs, 2, gone={Step.MASKED: (0, 1, 2, 3)}).play()
