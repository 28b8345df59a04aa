"""The graph that clients draw beyond 100: its bounds are right, its sums exact, and nobody else can choose it."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
from scipy.stats import hypergeom

from modicum.secure_aggregation import Client, MemoryStore, ProtocolError, Step, SumTerms, Variant, VoidError, wire
from modicum.secure_aggregation.graph import Graph, draw_neighbours
from modicum.secure_aggregation.shape import (
    FAILURE_PROBABILITY,
    STALL,
    Shape,
    _tails,
    agree_shape,
    failure_probability,
    stall,
)
from tests.secure_aggregation.adversary import Adversary, spy
from tests.secure_aggregation.players import Ring, Round, drawn, players, random_inputs, signing_key, terms_for

STEPS = tuple(Step)


def test_tails_are_exact() -> None:
    for population, marked, draws in ((11, 4, 5), (30, 25, 9), (119, 17, 36), (999, 420, 85)):
        found = 2.0 ** np.array(_tails(population, marked, draws))
        true = hypergeom.sf(np.arange(draws + 2) - 1, population, marked, draws)
        np.testing.assert_allclose(found, true, rtol=1e-6)
        assert np.all(found >= true * (1 - 1e-6))
    assert 2.0 ** _tails(11, 4, 5)[4] == pytest.approx(7 / comb(11, 5), rel=1e-8)  # all four, and one of seven


@pytest.mark.parametrize(
    ("clients", "colluders", "dropouts", "shape"),
    [
        (100, 1, 10, Shape(99, 90)),  # up to here everybody masks against everybody
        (101, 1, 10, Shape(32, 22)),
        (200, 20, 20, Shape(63, 43)),
        (200, 1, 40, Shape(199, 160)),  # with so many dropouts no small neighbourhood will do
        (500, 5, 50, Shape(77, 47)),
        (1000, 1, 50, Shape(51, 31)),
    ],
)
def test_the_shape_that_is_agreed_on(clients: int, colluders: int, dropouts: int, shape: Shape) -> None:
    """Small, and within both bounds; with one neighbour in three taken away it is not any more."""
    threshold = clients - dropouts
    assert agree_shape(clients, threshold, colluders, dropouts, dropouts) == shape
    assert failure_probability(clients, colluders, dropouts, shape) <= FAILURE_PROBABILITY
    assert stall(clients, dropouts, shape) <= STALL
    if shape.neighbours < clients - 1:
        mutant = Shape(2 * shape.neighbours // 3, 2 * shape.shares // 3)
        assert (
            failure_probability(clients, colluders, dropouts, mutant) > FAILURE_PROBABILITY
            or stall(clients, dropouts, mutant) > STALL
        )


def falls_apart(choices: dict[int, set[int]], colluders: set[int], least: int) -> bool:
    """Whether a group of at most half of the honest has `least` of each member's draws among it and colluders."""
    for size in range(1, len(choices) // 2 + 1):
        for group in combinations(choices, size):
            inside = colluders | set(group)
            if all(len(choices[i] & inside) >= least for i in group):
                return True
    return False


def test_the_bound_holds_for_drawn_graphs() -> None:
    """300 graphs of ten clients, every group looked at: as often as the bound says, at most (6 deviations)."""
    rng = np.random.default_rng(0)
    shape, bad = Shape(4, 4), 0
    for _ in range(300):
        choices = {}
        for i in range(9):
            others = [j for j in range(10) if j != i]
            choices[i] = set(rng.choice(others, shape.neighbours, replace=False).tolist())
        bad += falls_apart(choices, {9}, shape.shares - 1)
    bound = failure_probability(10, 1, 0, shape)
    assert 0 < bad / 300 <= bound + 6 * (bound / 300) ** 0.5
    assert bound < 0.5


def test_draws_are_uniform_and_nobody_elses() -> None:
    """Each of 9 others is drawn as often as the rest, within 6 deviations; the server only sees the outcome."""
    terms = terms_for(10, drawn(4, 4))
    counts = np.zeros(10)
    for _ in range(900):
        chosen = draw_neighbours(terms, 3)
        assert len(set(chosen)) == 4
        counts[list(chosen)] += 1
    assert counts[3] == 0
    others = np.delete(counts, 3)
    assert np.all(np.abs(others - 400) < 6 * np.sqrt(900 * 4 / 9 * 5 / 9))


def one_round(terms: SumTerms, gone: dict[Step, list[int]], seed: int) -> Round:
    return Round(terms, players(terms), random_inputs(terms, np.random.default_rng(seed)), gone=gone)


def test_a_round_of_101_with_dropouts_at_every_step() -> None:
    """The agreed graph: ten of 101 leave, two at each step, and the sum is exact."""
    terms = terms_for(101, colluders=1, threshold=91)
    assert terms.shape == Shape(32, 22)
    assert 0 < terms.failure_probability <= FAILURE_PROBABILITY
    game = one_round(terms, {step: [2 * k, 2 * k + 1] for k, step in enumerate(STEPS)}, 0)
    np.testing.assert_array_equal(game.play(), game.true_sum())
    assert game.survivors == tuple(range(6, 101))
    sent = len(game.seen[Step.SHARES][50])
    assert sent < 32 * 82 + 32 + wire.HEADER.size + wire.SIGNATURE + 1  # 32 neighbours at most, not 100


def random_case(seed: int) -> bool:
    """Random neighbourhoods and dropouts: the exact sum, or void for a reason. True if there is a sum."""
    rng = np.random.default_rng(seed)
    clients = int(rng.integers(5, 12))
    k = int(rng.integers(2, clients - 1))
    kind, variant = drawn(k, int(rng.integers(2, k + 1))), list(Variant)[int(rng.integers(2))]
    terms = terms_for(
        clients, kind, variant=variant, bits=int(rng.choice([32, 64])), dimension=int(rng.integers(1, 20))
    )
    leaves = {i: STEPS[int(rng.integers(5))] for i in range(clients) if rng.random() < 0.15}
    game = one_round(terms, {step: [i for i, s in leaves.items() if s is step] for step in STEPS}, seed)
    try:
        total = game.play()
    except VoidError:
        assert leaves  # nothing is lost where everybody stays
        return False
    np.testing.assert_array_equal(total, game.true_sum())
    return True


def test_random_graphs_and_dropouts() -> None:
    assert sum(random_case(case) for case in range(40)) > 12


@pytest.mark.soak
@pytest.mark.parametrize("block", range(3))
def test_three_thousand_graphs(block: int) -> None:
    for case in range(1000):
        random_case(10**6 + 1000 * block + case)


@pytest.mark.parametrize(
    "names", [(1, 2), (0, 1, 2), (1, 2, 3, 4), ()], ids=["too few", "itself", "too many", "nobody"]
)
def test_draws_of_the_wrong_size_are_refused(names: tuple[int, ...]) -> None:
    """By the server, for which such a client drops out, and by clients to whom they are shown all the same."""
    terms = terms_for(6, drawn(3, 2))

    class Odd(Ring):
        def _draw(self) -> tuple[int, ...]:
            return names if self.index == 0 else super()._draw()

    game = Round(terms, players(terms, Odd), random_inputs(terms, np.random.default_rng(0)))
    np.testing.assert_array_equal(game.play(), game.true_sum())
    assert game.survivors == (1, 2, 3, 4, 5)
    shown = b"".join(c.keys(2) for c in game.clients.values())
    with pytest.raises(ProtocolError, match="did not draw 3 others"):
        game.clients[1].shares(2, wire.request(terms, 2, Step.SHARES, shown))


class Persuaded(Ring):
    """The mutant lets somebody else choose its neighbours."""

    def _draw(self) -> tuple[int, ...]:
        return (3, 4, 5) if self.index == 0 else super()._draw()


@pytest.mark.parametrize("kind", [Ring, Persuaded])
def test_a_graph_that_the_server_chooses(kind: type[Client]) -> None:
    """Colluders 3, 4 and 5 for neighbours: they hold every share, and its masks are theirs too."""
    terms = terms_for(9, drawn(3, 3), colluders=3, dimension=4096)
    game = Round(terms, players(terms, kind), {i: np.full(4096, i + 1) for i in range(9)})
    masked = game.until_masked()
    enemy = Adversary(terms, (3, 4, 5))
    spy(game, enemy.colluders)
    enemy.watch(game)  # before anybody has revealed anything
    assert (masks_of(game, 0) in enemy.mask_keys) == (kind is Persuaded)
    game.finish(masked)


def masks_of(game: Round, client: int) -> bytes:
    return game.seen[Step.KEYS][client][wire.HEADER.size :][:32]


class Trusting(Ring):
    """The mutant masks and signs without counting who holds whose shares."""

    def _check_set(self, graph: Graph, members: tuple[int, ...], within: tuple[int, ...], what: str) -> None:
        del graph, within
        self._enough(members, what)


VICTIM, AROUND = 8, (4, 5, 6, 7, 9, 10, 11, 12)


def wide_terms(**changes: Any) -> SumTerms:
    return terms_for(20, drawn(4, 3), **({"colluders": 1, "threshold": 11, "dimension": 4096} | changes))


@pytest.mark.parametrize("kind", [Ring, Trusting])
def test_a_client_that_is_shown_no_neighbours(kind: type[Client]) -> None:
    """Client 8 is told that all its neighbours dropped out before it masked; the others are told nothing.

    The mutant has no mask but its own, which its neighbours then open: its input lies bare.
    """
    terms = wide_terms()
    clients = {i: kind(terms, i, signing_key(i), MemoryStore()) for i in range(20)}
    game = Round(terms, clients, {i: np.full(4096, i + 1) for i in range(20)})

    def lie(step: Step, client: int, request: bytes) -> bytes:
        if (step, client) != (Step.MASKED, VICTIM):
            return request
        left = wire.write_set(terms, [i for i in range(20) if i not in AROUND])
        return wire.request(terms, 1, step, left)

    game.deliver = lie
    masked = game.until_masked()
    spy(game, (19,))
    if kind is Ring:
        assert VICTIM not in game.seen[Step.MASKED]
        assert VICTIM not in masked.survivors
        return
    everybody = wire.request(terms, 1, Step.CONSENT, wire.write_set(terms, range(20)))
    signed = [clients[i].consent(1, everybody) for i in range(20) if i != VICTIM]
    request = wire.request(terms, 1, Step.REVEAL, b"".join(signed))
    enemy = Adversary(terms, (19,))
    enemy.watch(game, [clients[i].reveal(1, request) for i in range(20) if i != VICTIM])
    assert set(enemy.residual_alone(game, VICTIM)) == {VICTIM + 1}


def apart(base: type[Ring]) -> type[Ring]:
    """Nobody draws client 8; it draws 9 to 12, whom nobody else draws."""
    rest = [i for i in range(20) if not 8 <= i <= 12]

    class Apart(base):  # type: ignore[misc,valid-type]
        def _draw(self) -> tuple[int, ...]:
            if self.index == VICTIM:
                return (9, 10, 11, 12)
            start = rest.index(self.index) if self.index in rest else 0
            return tuple(rest[(start + j + 1) % len(rest)] for j in range(4))

    return Apart


@pytest.mark.parametrize("base", [Ring, Trusting])
def test_survivors_around_whom_everybody_is_gone(base: type[Ring]) -> None:
    """All neighbours of client 8 are declared lost after masking: the sum of the others would lack its noise.

    16 of 20 survive, as many as the threshold, so the noise of 15 is counted; the mutant opens the sum of 14.
    """
    terms = wide_terms(threshold=16)
    clients = players(terms, apart(base))
    game = Round(terms, clients, {i: np.full(4096, i + 1) for i in range(20)})
    game.until_masked()
    spy(game, (19,))
    left = [i for i in range(20) if not 9 <= i <= 12]
    consent = wire.request(terms, 1, Step.CONSENT, wire.write_set(terms, left))
    if base is Ring:
        with pytest.raises(ProtocolError, match="client 8 has fewer than 3 holders"):
            clients[14].consent(1, consent)
        return
    signed = b"".join(clients[i].consent(1, consent) for i in left)
    enemy = Adversary(terms, (19,))
    enemy.watch(game, [clients[i].reveal(1, wire.request(terms, 1, Step.REVEAL, signed)) for i in left])
    honest = set(left) - {VICTIM, 19}
    assert len(honest) == terms.honest - 1
    assert set(enemy.residual(game, honest)) == {sum(i + 1 for i in honest)}
