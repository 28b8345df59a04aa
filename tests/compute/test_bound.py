"""One record moves a clipped sum by at most its bound in the arithmetic that is used, whatever the model is.

A search for the largest movement: a hostile model decides over inputs and output gradients of every layer, so the
search does. Hypothesis chooses the structure (which route, how many examples and places, where the record's terms
cancel, how large they are beside the others'), and a climb over magnitudes goes on from there. Everything runs
through the pieces, factors and sums that training uses. Plain float32 arithmetic is the negative control.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

from modicum.compute import Flat, clipped_sum, reference_clipped_sum
from modicum.compute.clipping import pieces, sums
from modicum.compute.clipping.pieces import LinearWeight
from modicum.compute.clipping.sums import (
    SHARE,
    SHORT,
    adds_up,
    longest_run,
    runs,
    sum_type,
    weighted_outer,
    weighted_products,
    weighted_rows,
)
from modicum.models import build
from tests.compute.attacks import (
    CAUGHT,
    MODELS,
    MUTANTS,
    RETURNED_WIDE,
    ROUTES,
    THRESHOLDS,
    Attack,
    by_factors,
    climb,
    hostile_climb,
    hostile_movement,
    onto_a_total_that_is_swallowed,
    plain_gram,
    term_by_term,
)
from tests.compute.helpers import cross_entropy

LIMIT = 1 + 1e-3
Library = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Adds products onto a total."""


def attacks(*batches: int) -> st.SearchStrategy[Attack]:
    return st.builds(
        Attack,
        batch=st.sampled_from(batches),
        places=st.sampled_from([1, 2, 5, 16, 80]),
        wide=st.sampled_from([2, 8, 16]),
        record=st.integers(0, 1 << 20),
        swallows=st.lists(st.integers(0, 79), max_size=6).map(tuple),
        large=st.floats(0, 8),
        small=st.floats(-6, 2),
        others=st.floats(-3, 3),
        alike=st.booleans(),
        seed=st.integers(0, 1 << 20),
        reverse=st.booleans(),
    )


DAILY = [name for name in ROUTES if "bf16" not in name]
"""The others differ from these on a GPU alone."""


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SEARCH = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", DAILY)
@settings(max_examples=10, derandomize=True, **SEARCH)
@given(attack=attacks(*THRESHOLDS))
def test_no_record_moves_a_sum_beyond_its_bound(name: str, number: int, attack: Attack) -> None:
    with threads(number):
        assert attack.movement(ROUTES[name]) <= LIMIT


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", list(ROUTES))
@settings(max_examples=40, **SEARCH)
@given(attack=attacks(*THRESHOLDS, RETURNED_WIDE))
def test_no_record_moves_a_sum_beyond_its_bound_in_a_long_search(name: str, number: int, attack: Attack) -> None:
    with threads(number):
        assert climb(attack, ROUTES[name], 10) <= LIMIT


@pytest.mark.parametrize("name", list(CAUGHT))
def test_the_search_catches_plain_float32(name: str) -> None:
    found = (climb(attack, MUTANTS[name], steps) for steps in (0, 3) for attack in CAUGHT[name])
    assert any(movement > 1.5 for movement in found)


def test_the_search_catches_a_library_that_adds_term_by_term() -> None:
    """Everybody's terms that cancel round the total as they go, by more or less where a record was added to it."""
    attack = Attack(48, 3, 5, 0, (0, 2), 5.0, 0.0, -1.0, alike=True, seed=0, reverse=True)
    assert attack.movement(onto_a_total_that_is_swallowed) > 1.05
    assert attack.movement(ROUTES["linear, onto one total"]) <= LIMIT


def by_halves(total: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Onto a total twice: half of the places, then the others."""
    for left, right in zip(lefts, rights, strict=True):
        half = (len(right) + 1) // 2
        for some in (slice(0, half), slice(half, None)):
            total += (left[:, some].double() @ right[some].double()).float()
    return total


def by_itself(total: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """What is wanted, whatever the order within: an example's own sum first."""
    for left, right in zip(lefts, rights, strict=True):
        own = torch.zeros_like(total)
        for t in torch.randperm(len(right)).tolist():
            own += left[:, t, None] * right[None, t]
        total += own
    return total


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("places", [2, 3, 16, 65])
@pytest.mark.parametrize(("library", "trusted"), [(term_by_term, False), (by_halves, False), (by_itself, True)])
def test_one_product_tells_when_a_library_adds_onto_a_total(
    library: Library, trusted: bool, places: int, by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "_onto", library)
    assert sums.accumulates_before_adding.__wrapped__(5, 7, places, torch.float32, 1, by_rows=by_rows) is trusted


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("batch", [129, 256, 380])
def test_runs_are_the_same_either_way(asked: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the library is trusted with a total or not; where it is, nothing else is asked to add."""
    added: list[int] = []

    def onto(total: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
        added.extend(map(len, rights))
        return by_itself(total, lefts, rights)

    monkeypatch.setattr(sums, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(sums, "accumulates_before_adding", lambda *_, **__: asked)
    monkeypatch.setattr(sums, "_onto", onto)
    g, a, w = torch.randn(batch, 16), torch.randn(batch, 32), torch.rand(batch)
    expected = torch.einsum("b,bp,bn->pn", w.double(), g.double(), a.double())
    torch.testing.assert_close(weighted_outer(w, g, a).double(), expected, rtol=1e-5, atol=1e-5)
    assert sum(added) == (batch if asked else 0)
    assert all(rows <= runs(batch, torch.float32)[0] for rows in added)
    beside = torch.randn(batch * 32 + 1)[1:].view(batch, 32)  # rows that begin no line of the cache
    weighted_outer(w, g, beside)
    assert sum(added) == (batch if asked else 0)


@pytest.mark.parametrize("asked", [True, False])
def test_products_are_the_same_either_way(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the library is trusted or not, in blocks of one size and up to many examples, by some columns."""
    monkeypatch.setattr(sums, "WORTH_A_CALL", 0)
    monkeypatch.setattr(sums, "TOTAL", 64)
    monkeypatch.setattr(sums, "accumulates_before_adding", lambda *_, **__: asked)
    for batch in (0, 3, 16, 37, 500, 1600):
        g, a, w = torch.randn(batch, 2, 4, 5), torch.randn(batch, 2, 41, 5), torch.rand(batch)
        found = weighted_products(w, g, lambda some, units, a=a: a[some, :, units], 41, 1)
        expected = torch.einsum("b,bgpt,bgnt->gpn", w.double(), g.double(), a.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_block_that_is_longer_than_the_first_is_refused() -> None:
    """The first block decides how all are added up: the first of 8 lets 300 examples be added in float32 alone."""
    weights, rows = torch.ones(300), torch.ones(300, 2)
    assert torch.equal(weighted_rows(weights, rows.split(8)), torch.full((2,), 300.0))
    with pytest.raises(AssertionError):
        weighted_rows(weights, [rows[:8], rows[8:]])


def deep(a: float) -> tuple[Tensor, Tensor]:
    """Two places whose inputs differ in 4096 numbers, each of which vanishes beside one that they share."""
    inputs = torch.full((2, 2, 4097), 2.0**-13)
    inputs[:, 1] *= -1
    inputs[:, :, 0] = 1.0
    outputs = torch.ones(2, 2, 300)
    outputs[:, 1] = -1
    return a * inputs, outputs


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_gram_norms_see_what_a_large_entry_swallows(size: float) -> None:
    a, g = deep(size)
    truth = (g.double().transpose(1, 2) @ a.double()).flatten(1).norm(dim=1)
    squares, _ = by_factors(a, g)
    assert bool((squares.sqrt() >= truth).all())
    assert bool((plain_gram(a, g)[0].sqrt() < 0.5 * truth).all())  # eight units in the last place are too few


def test_many_examples_are_not_added_up_in_float32_alone() -> None:
    """Where partial sums are large, rounding takes the same from each of the others' terms."""
    batch = 20_000
    rows = torch.full((batch, 4), 0.5 - 2.0**-12)
    rows[0] = 0.5
    truth = rows.double().sum(0)
    ones = torch.ones(batch)
    for total in (weighted_rows(ones, [rows]), weighted_outer(ones, rows, torch.ones(batch, 1))[:, 0]):
        assert total.dtype == torch.float64  # float32 would round a sum of this size by more than its share
        assert float((total - truth).abs().max()) < 1e-6
    plain = torch.zeros(4)
    for row in rows:
        plain += row
    assert float((plain - truth).abs().max()) > 0.1


def rounded(lengths: Sequence[int], *, float64_totals: bool) -> int:
    """In units of u·C, what adding up runs of so many terms may be off by if each run, and then the totals, are
    bracketed as a chain: an addition rounds by u of its result, which is at most as many times C as there are
    terms under it."""
    within = sum(n * (n + 1) // 2 - 1 for n in lengths if n)
    if len(lengths) == 1:
        return within
    return within + (sum(lengths) if float64_totals else sum(itertools.accumulate(lengths)) - lengths[0])


def moved_by_rounding(batch: int, run: int, *, float64_totals: bool) -> float:
    """Of C, with a record and with a blank in its place, in the first run or the last: zero is added exactly."""
    lengths = [min(run, batch - start) for start in range(0, batch, run)]
    blanked = [[lengths[0] - 1, *lengths[1:]], [*lengths[:-1], lengths[-1] - 1]]
    most = max(rounded(those, float64_totals=float64_totals) for those in blanked)
    return (rounded(lengths, float64_totals=float64_totals) + most) * torch.finfo(torch.float32).eps / 2


def test_runs_are_as_short_as_the_worst_order_needs() -> None:
    for batch in range(2, 1500):
        run, kind = runs(batch, torch.float32)
        assert moved_by_rounding(batch, run, float64_totals=kind == torch.float64) <= SHARE + 2.0**-18
        own = longest_run(batch, torch.float32)
        assert moved_by_rounding(batch, own, float64_totals=True) <= SHARE + 2.0**-18
    for batch, run in itertools.product(range(2, 420), (4, 16, 32, 60)):
        if adds_up(batch, run, torch.float32):
            assert moved_by_rounding(batch, run, float64_totals=False) <= SHARE + 2.0**-18
    assert [runs(n, torch.float32)[1] for n in (128, 256, 380, 1000)] == [torch.float32] * 3 + [torch.float64]


def test_the_search_is_on_both_sides_of_every_change() -> None:
    def arithmetic(batch: int) -> tuple[object, ...]:
        run, kind = runs(batch, torch.float32)
        return run >= batch, kind, run < SHORT, sum_type(batch, torch.float32)

    changes = {batch for batch in range(2, 5000) if arithmetic(batch) != arithmetic(batch - 1)}
    assert changes <= {*THRESHOLDS, RETURNED_WIDE}


def test_sums_over_nobody_are_zero() -> None:
    nobody = torch.zeros(0)
    assert torch.equal(weighted_rows(nobody, [torch.zeros(0, 3)]), torch.zeros(3))
    assert torch.equal(weighted_outer(nobody, torch.zeros(0, 2), torch.zeros(0, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("batch", "run", "float64_totals"), [(1600, 8, True), (132, 132, False), (256, 64, False)]
)
def test_longer_ones_would_not_do(batch: int, run: int, float64_totals: bool) -> None:
    assert moved_by_rounding(batch, run, float64_totals=float64_totals) > 1e-3


hostile = {
    "batch": st.sampled_from([33, 64, 92, 130]),
    "sizes": st.lists(st.floats(-4, 9), min_size=8, max_size=8),
    "signs": st.booleans(),
    "seed": st.integers(0, 1 << 20),
}


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=6, derandomize=True, **SEARCH)
@given(**hostile)
def test_no_model_moves_a_sum_beyond_its_bound(
    name: str, batch: int, sizes: list[float], signs: bool, seed: int
) -> None:
    assert hostile_movement(name, batch, sizes, signs, seed) <= LIMIT


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=60, **SEARCH)
@given(**hostile)
def test_no_model_moves_a_sum_beyond_its_bound_in_a_long_search(
    name: str, number: int, batch: int, sizes: list[float], signs: bool, seed: int
) -> None:
    with threads(number):
        assert hostile_climb(name, batch, sizes, signs, seed, 5) <= LIMIT


def digits(shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Real images, enlarged to what a model expects."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x[:count], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    enlarged = nn.functional.interpolate(images, shape[1:], mode="bilinear")
    return enlarged.expand(-1, shape[0], -1, -1).contiguous(), torch.tensor(y[:count], dtype=torch.long)


def trained_a_little(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()


@pytest.mark.parametrize(
    ("name", "shape", "count", "train"),
    [("mlp", (1, 28, 28), 32, True), ("cnn-small", (1, 28, 28), 32, False), ("cnn-small", (1, 28, 28), 32, True),
     ("lenet", (1, 28, 28), 32, True), ("cnn8", (1, 28, 28), 4, True), ("resnet18", (3, 32, 32), 2, False)],
)  # fmt: skip
def test_on_ordinary_data_factors_are_what_they_should_be(
    name: str, shape: tuple[int, ...], count: int, train: bool
) -> None:
    """What rounding is charged for changes no clip factor by more than a thousandth."""
    model = build(name, shape, 10, seed=0)
    x, y = digits(shape, count)
    if train:
        trained_a_little(model, x, y)
    found = clipped_sum(model, cross_entropy, x, y, Flat(1e-3)).norms
    truth = reference_clipped_sum(model.double(), cross_entropy, x.double(), y, Flat(1e-3)).norms
    torch.testing.assert_close(found.double(), truth, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("charge", [1.0, 1e4])
def test_a_charge_that_shrinks_everything_would_be_noticed(charge: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the last test: norms that are safe because they are much too large."""
    real = pieces.factor_charge
    monkeypatch.setattr(pieces, "factor_charge", lambda *sizes, joint: charge * real(*sizes, joint=joint))
    torch.manual_seed(0)
    a, g = torch.rand(8, 16, 64), torch.randn(8, 16, 64)
    truth = LinearWeight(a, g).dense().flatten(1).norm(dim=1).double()
    off = float((LinearWeight(a, g).measure_factors().sqrt() / truth - 1).max())
    assert (off <= 1e-3) is (charge == 1.0)
