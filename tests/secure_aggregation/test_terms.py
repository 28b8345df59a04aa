"""Terms that cannot hold are refused; everything in them is bound into every message; secret sharing is right."""

from __future__ import annotations

import os
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from modicum.errors import UserError
from modicum.privacy.noise.integer_terms import agree
from modicum.privacy.noise.lattice import dequantise, quantise
from modicum.secure_aggregation import Client, MemoryStore, SumTerms, Variant, shamir, signed, wire
from tests.secure_aggregation.players import Round, players, public_bytes, signing_key, terms_for


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"keys": tuple(i.to_bytes(32) for i in range(1001)), "threshold": 600}, "per_round = 1000"),
        ({"keys": (bytes(32),), "threshold": 1}, "at least 2 clients"),
        ({"keys": (bytes(32),) * 5}, "public key of its own"),
        ({"keys": tuple(bytes([i]) * 31 for i in range(5))}, "public key of its own"),
        ({"threshold": 3, "colluders": 1}, "2t > P \\+ c"),
        ({"threshold": 2, "colluders": 2, "variant": Variant.HONEST_BUT_CURIOUS}, "above its 2 colluders"),
        ({"threshold": 4, "dropouts": 2}, "fewer than the threshold"),
        ({"colluders": -1}, "colluders"),
        ({"dropouts": -1}, "colluders"),
        ({"bits": 16}, "2\\^32 or 2\\^64"),
        ({"dimension": 0}, "coordinates"),
        ({"dimension": 2**28 + 1}, "coordinates"),
        ({"run": ""}, "name"),
        ({"run": "a\nb"}, "name"),
    ],
)
def test_refused_terms(changes: dict[str, Any], text: str) -> None:
    given = {"threshold": 3, "dropouts": 0} | changes
    with pytest.raises(UserError, match=text) as info:
        terms_for(5, **given)
    assert "\n" not in str(info.value)


def test_the_threshold_is_sharp() -> None:
    """2t > P + c: at P = 50, c = 1 that is t = 26, as small as it gets."""
    keys = tuple(public_bytes(i) for i in range(50))
    given: dict[str, Any] = {"run": "r", "keys": keys, "colluders": 1, "dropouts": 3, "dimension": 1}
    assert SumTerms(threshold=26, **given).honest == 25
    with pytest.raises(UserError, match="at least 26"):
        SumTerms(threshold=25, **given)


def test_every_term_is_bound() -> None:
    base = terms_for(5, colluders=1, threshold=4, dropouts=0)
    others = [
        {"run": "run-2"}, {"threshold": 5}, {"colluders": 0}, {"dropouts": 1}, {"dimension": 9}, {"bits": 64},
        {"variant": Variant.HONEST_BUT_CURIOUS}, {"context": "noise"},
    ]  # fmt: skip
    given = {"colluders": 1, "threshold": 4, "dropouts": 0}
    digests = {base.digest} | {terms_for(5, **(given | change)).digest for change in others}
    assert len(digests) == 1 + len(others)


def test_a_client_is_who_it_says() -> None:
    terms = terms_for(3)
    with pytest.raises(UserError, match="signing key"):
        Client(terms, 0, signing_key(1), MemoryStore())
    with pytest.raises(UserError, match="clients 0 to 2"):
        Client(terms, 3, signing_key(3), MemoryStore())


@pytest.mark.parametrize("vector", [np.zeros(7, dtype=np.int64), np.zeros(8), np.zeros((8, 1), dtype=np.int64)])
def test_inputs_are_integers_of_the_right_number(vector: np.ndarray) -> None:
    terms = terms_for(3)
    game = Round(terms, players(terms), dict.fromkeys(range(3), vector))
    with pytest.raises(UserError, match="8 integers"):
        game.play()


def test_any_t_shares_give_the_secret_and_fewer_do_not() -> None:
    secret = os.urandom(32)
    shares = shamir.split(secret, 3, range(6))
    for holders in combinations(range(6), 3):
        assert shamir.combine(shares, shamir.weights(holders)) == secret
    for holders in combinations(range(6), 2):
        assert shamir.combine(shares, shamir.weights(holders)) != secret
    for extreme in (bytes(32), b"\xff" * 32):
        assert shamir.combine(shamir.split(extreme, 2, (3, 9)), shamir.weights((3, 9))) == extreme


def test_shares_alone_are_uniform() -> None:
    """The lowest bits of one share of the same secret: 2,000 draws, each of 8 values within 6 deviations."""
    counts = Counter(shamir.split(bytes(32), 2, (0, 1))[1][0] & 7 for _ in range(2000))
    assert all(abs(counts[k] - 250) < 6 * 15 for k in range(8))


def test_shares_have_one_encoding() -> None:
    assert shamir.is_share((shamir.PRIME - 1).to_bytes(33, "little"))
    assert not shamir.is_share(shamir.PRIME.to_bytes(33, "little"))
    assert not shamir.is_share(bytes(32))
    assert pow(3, shamir.PRIME - 1, shamir.PRIME) == 1


@pytest.mark.parametrize(
    "bad",
    [
        lambda: shamir.split(bytes(31), 2, (0, 1)),
        lambda: shamir.split(bytes(32), 3, (0, 1)),
        lambda: shamir.split(bytes(32), 2, (0, 0)),
        lambda: shamir.split(bytes(32), 2, (-1, 0)),
        lambda: shamir.weights((1, 1)),
    ],
)
def test_wrong_sharings_are_refused(bad: Any) -> None:
    with pytest.raises(UserError):
        bad()


def test_sets_have_one_encoding() -> None:
    terms = terms_for(10)
    assert wire.read_set(terms, wire.write_set(terms, {9, 0, 3})) == (0, 3, 9)
    for bad in (b"\1", b"\1\0\0", b"\0\4"):
        with pytest.raises(UserError):
            wire.read_set(terms, bad)


@pytest.mark.parametrize("bits", [32, 64])
def test_private_vectors_from_end_to_end(bits: int) -> None:
    """Clip, rotate, round, noise, mask, sum, unmask, undo: the sum of the survivors' vectors plus its noise."""
    noise = agree(
        dimension=300, smallest_multiplier=0.5, largest_multiplier=1.0, clients=8, honest=5, units=8, loss=1e-3
    )
    assert noise.bits == 32
    terms = terms_for(
        8, colluders=1, threshold=6, dimension=noise.lattice.dimension, bits=bits, context=repr(noise)
    )
    assert terms.honest == noise.honest
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((8, 300))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    square = noise.square(0.5)
    inputs = {
        i: quantise(rows[i], noise.lattice, square, b"round 1") + noise.table.draw(noise.lattice.dimension)
        for i in range(8)
    }
    game = Round(terms, players(terms), inputs)
    total = signed(game.play())
    noise.check_sum(total)
    np.testing.assert_array_equal(total, sum(inputs.values()))
    error = dequantise(total, noise.lattice, b"round 1") - rows.sum(axis=0)
    std = np.sqrt(8 * noise.share) / noise.lattice.steps
    assert 0.8 * std < np.std(error) < 1.25 * std
