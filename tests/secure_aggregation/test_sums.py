"""Sums are exact whoever drops out and whenever, or there is none."""

from __future__ import annotations

import numpy as np
import pytest

from modicum.secure_aggregation import Client, MemoryStore, ProtocolError, Step, Variant, VoidError
from tests.secure_aggregation.players import Round, players, public_bytes, random_inputs, signing_key, terms_for

STEPS = tuple(Step)


@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("bits", [32, 64])
def test_a_plain_round(variant: Variant, bits: int) -> None:
    terms = terms_for(7, colluders=1, variant=variant, bits=bits, dimension=40_000)
    inputs = random_inputs(terms, np.random.default_rng(0))
    game = Round(terms, players(terms), inputs)
    np.testing.assert_array_equal(game.play(), game.true_sum())
    assert game.survivors == tuple(range(7))


def random_case(seed: int) -> None:
    """A random federation, random dropouts at every step: the exact sum, or void with fewer than t left."""
    rng = np.random.default_rng(seed)
    clients = int(rng.integers(2, 9))
    colluders = int(rng.integers(0, max(1, clients - 2)))
    variant = list(Variant)[int(rng.integers(2))]
    low = (clients + colluders) // 2 + 1 if variant is Variant.SIGNED_SURVIVORS else colluders + 1
    terms = terms_for(
        clients,
        colluders=colluders,
        threshold=int(rng.integers(low, clients + 1)),
        variant=variant,
        bits=int(rng.choice([32, 64])),
        dimension=int(rng.integers(1, 20)),
    )
    leaves = {i: STEPS[int(rng.integers(5))] for i in range(clients) if rng.random() < 0.25}
    gone = {step: [i for i, s in leaves.items() if s is step] for step in STEPS}
    game = Round(terms, players(terms), random_inputs(terms, rng), int(rng.integers(2**32)), gone)
    last = clients - len(leaves)
    if last < terms.threshold:
        with pytest.raises(VoidError):
            game.play()
        return
    np.testing.assert_array_equal(game.play(), game.true_sum())
    early = [i for i, s in leaves.items() if s <= Step.MASKED]
    assert game.survivors == tuple(i for i in range(clients) if i not in early)


@pytest.mark.parametrize("block", range(3))
def test_random_dropouts(block: int) -> None:
    for case in range(100):
        random_case(1000 * block + case)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(4))
def test_four_thousand_cases(block: int) -> None:
    for case in range(1000):
        random_case(10**6 + 1000 * block + case)


def test_cohorts_change() -> None:
    """Each cohort has its own terms; a client answers one of them in a round, from one store."""
    stores = {i: MemoryStore() for i in range(6)}
    for number, members in enumerate(((0, 1, 2, 3), (2, 3, 4, 5), (0, 1, 4, 5)), start=1):
        terms = terms_for(4, keys=tuple(public_bytes(i) for i in members))
        clients = {k: Client(terms, k, signing_key(i), stores[i]) for k, i in enumerate(members)}
        game = Round(terms, clients, random_inputs(terms, np.random.default_rng(number)), number)
        np.testing.assert_array_equal(game.play(), game.true_sum())
    other = terms_for(4, keys=tuple(public_bytes(i) for i in (0, 1, 2, 3)))
    with pytest.raises(ProtocolError, match="another request"):
        Client(other, 0, signing_key(0), stores[0]).keys(3)


def test_rounds_overlap() -> None:
    """The keys of round 2 ride on the exchanges of round 1, and both sums are right."""
    terms = terms_for(4)
    clients = players(terms)
    first = Round(terms, clients, random_inputs(terms, np.random.default_rng(1)), 1)
    second = Round(terms, clients, random_inputs(terms, np.random.default_rng(2)), 2)

    def early(step: Step, sender: int, message: bytes) -> list[bytes]:
        if step is Step.MASKED:
            clients[sender].keys(2)
        return [message]

    first.carry = early
    np.testing.assert_array_equal(first.play(), first.true_sum())
    np.testing.assert_array_equal(second.play(), second.true_sum())
