"""From vectors to integers: the bound holds on the integers, the mean is kept, and the terms add up."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from modicum.errors import UserError
from modicum.privacy.accounting import skellam
from modicum.privacy.noise.integer_terms import IntegerTerms, agree, wrap_probability
from modicum.privacy.noise.lattice import (
    Lattice,
    dequantise,
    finest_needed,
    hadamard,
    quantise,
    rotate,
    round_rows,
    squared_norms,
)


def unit_rows(count: int, dimension: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dimension))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128, 4096])
def test_hadamard(size: int) -> None:
    rows = np.random.default_rng(0).standard_normal((3, size))
    signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(min(size, 8))])
    turned = hadamard(rows)
    np.testing.assert_allclose(turned[:, :8], rows @ signs.T / math.sqrt(size), atol=1e-12)
    np.testing.assert_allclose(hadamard(turned), rows, atol=1e-12)


@pytest.mark.parametrize("dimension", [1, 2, 3, 7, 512, 650, 1000, 1023])
def test_rotation_is_orthonormal_and_needs_no_padding(dimension: int) -> None:
    """R·Rᵀ = 1 for any number of coordinates, so no norm changes; what it does is undone."""
    turned = rotate(np.eye(dimension), b"seed")
    assert turned.shape == (dimension, dimension)
    np.testing.assert_allclose(turned @ turned.T, np.eye(dimension), atol=1e-12)
    lattice = Lattice(dimension, 1 << 20)
    whole = np.round(turned[0] * lattice.steps).astype(np.int64)
    np.testing.assert_allclose(dequantise(whole, lattice, b"seed"), np.eye(dimension)[0], atol=1e-4)


@pytest.mark.parametrize("place", [3, 500, 999])
def test_rotation_keeps_norms_and_spreads(place: int) -> None:
    spike = np.zeros((1, 1000))
    spike[0, place] = 1.0
    turned = rotate(spike, b"seed")
    assert np.linalg.norm(turned) == pytest.approx(1.0)
    assert np.abs(turned).max() < 2 / math.sqrt(512)
    many = unit_rows(1, 1000)
    assert not np.allclose(rotate(many, b"seed"), rotate(many, b"other"))


@pytest.mark.parametrize("steps", [1, 8, 64, 4096])
@pytest.mark.parametrize("dimension", [1, 5, 200])
def test_integers_keep_to_the_square(steps: int, dimension: int) -> None:
    """Ordinary rows, rows that are too long, spikes, and the worst for rounding: all coordinates at a half."""
    lattice = Lattice(dimension, steps)
    square = lattice.square(steps)
    rows = np.concatenate([unit_rows(200, dimension), 1e9 * unit_rows(20, dimension), np.eye(dimension)])
    assert np.all(squared_norms(quantise(rows, lattice, square, b"s")) <= square)
    halves = np.full((200, lattice.dimension), steps / math.sqrt(lattice.dimension))
    halves = np.floor(halves) + 0.5
    assert np.all(squared_norms(round_rows(halves, square)) <= square)


def test_rounding_without_the_condition_is_caught() -> None:
    """The mutant rounds once and keeps what comes: halves exceed the square in a tenth of the rows."""
    square = Lattice(1024, 80).square(80)
    halves = np.full((500, 1024), 2.5)  # norm 80
    assert np.any(squared_norms(round_rows(halves, 1 << 60)) > square)
    assert np.all(squared_norms(round_rows(halves, square)) <= square)


def test_rows_that_can_never_fit_become_zero() -> None:
    """Somebody forgot to clip: the bound holds all the same."""
    assert not round_rows(np.full((2, 64), 5.0), 100).any()


def test_rounding_accepts_as_often_as_it_says() -> None:
    """At least 1 − e^−½ = 39 % of single roundings keep to the square; 2,000 rows, false alarm under 10^−9."""
    lattice = Lattice(256, 16)
    rows = rotate(unit_rows(2000, 256) * lattice.steps, b"s")
    fits = squared_norms(round_rows(rows, 1 << 60)) <= lattice.square(lattice.steps)
    assert np.mean(fits) > 1 - math.exp(-0.5) - 0.07


def test_rounding_keeps_the_mean() -> None:
    row = np.array([[0.25, -0.25, 3.5, -7.75, 0.0, 2.0]])
    mean = round_rows(np.repeat(row, 40_000, axis=0), 1 << 60).mean(axis=0)
    np.testing.assert_allclose(mean, row[0], atol=6 * 0.5 / 200)
    assert mean[4] == 0.0
    assert mean[5] == 2.0


def test_there_and_back() -> None:
    lattice = Lattice(900, 1 << 14)
    rows = unit_rows(7, 900)
    total = quantise(rows, lattice, lattice.square(lattice.steps), b"s").sum(axis=0)
    np.testing.assert_allclose(dequantise(total, lattice, b"s"), rows.sum(axis=0), atol=1e-3)
    one = quantise(rows[0], lattice, lattice.square(lattice.steps), b"s")
    assert one.shape == (900,)


@pytest.mark.parametrize(("dimension", "norm"), list(product([1, 100, 10**6], [0.5, 30.0, 4096.0, 1e6])))
def test_norm_and_square_are_inverse(dimension: int, norm: float) -> None:
    lattice = Lattice(dimension, 4096)
    square = lattice.square(norm)
    assert square >= 1
    assert lattice.norm(square) <= norm
    assert lattice.norm(square + 1) >= norm * (1 - 1e-12)
    assert lattice.square(lattice.norm(square)) <= square


def test_squared_norms_are_exact() -> None:
    rng = np.random.default_rng(0)
    for top in (10, 2**20, 2**31 - 1, 2**40):
        rows = rng.integers(-top, top + 1, (4, 33))
        assert squared_norms(rows).tolist() == [sum(int(x) ** 2 for x in row) for row in rows]


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, -(2**31), 2**31])
def test_squared_norms_at_the_ends_of_the_range(value: int) -> None:
    """−2^63 is its own absolute value: a mutant that trusts `np.abs` takes its square for 0 and lets it pass."""
    assert squared_norms(np.array([[value, 3]])).tolist() == [value**2 + 9]
    if value == -(2**63):
        assert not np.any(np.abs(np.array([value])) >= 1 << 31)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1e19])
def test_what_no_integer_holds_is_not_rounded(value: float) -> None:
    """Cast all the same, as the mutant does, it becomes another number; which one depends on the processor."""
    with pytest.raises(UserError, match="finite"):
        round_rows(np.array([[value, 1.0]]), 100)
    with np.errstate(invalid="ignore"):
        assert float(np.array([value]).astype(np.int64)[0]) != value


def small_terms(**changes: object) -> IntegerTerms:
    given: dict[str, object] = {
        "dimension": 500, "smallest_multiplier": 2.0, "largest_multiplier": 20.0, "clients": 10, "honest": 5,
    }  # fmt: skip
    return agree(**(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("multiplier", [2.0, 2.5, 7.0, 20.0])
def test_every_budget_gets_its_noise(multiplier: float) -> None:
    """z_i holds in what the noise of t − c is worth, and costs at most a few per cent of scale."""
    terms = small_terms()
    square = terms.square(multiplier)
    assert terms.multiplier(square) >= multiplier
    scale = terms.lattice.norm(square) / terms.lattice.steps
    assert 0.98 * 2.0 / multiplier < scale <= 2.0 / multiplier
    rows = quantise(unit_rows(50, 500), terms.lattice, square, b"s")
    assert np.all(squared_norms(rows) <= square)


def test_counting_one_client_too_many_is_caught() -> None:
    """The mutant counts t − c + 1: with only t − c honest in the sum, the true multiplier is under its claim."""
    terms = small_terms()
    mutant = small_terms(honest=6)
    square = mutant.square(2.0)
    true = skellam.gaussian_multiplier(terms.honest * mutant.share, square)
    assert mutant.multiplier(square) >= 2.0 > true
    assert terms.multiplier(terms.square(2.0)) >= 2.0


def test_shares_are_rounded_up() -> None:
    for honest in range(1, 11):
        terms = small_terms(honest=honest)
        assert terms.multiplier(terms.lattice.square(terms.lattice.steps)) >= 2.0


def test_the_smallest_scaled_bound_chooses_the_lattice() -> None:
    wide, narrow = finest_needed(500, 0.1, 0.01), finest_needed(500, 1.0, 0.01)
    assert wide.steps == 8 * narrow.steps or wide.steps == 16 * narrow.steps
    assert wide.square(0.1 * wide.steps) <= 1.01 * (0.1 * wide.steps) ** 2


@pytest.mark.parametrize(("dimension", "smallest", "largest"), [(1, 34.6, 489.8), (2, 1.0, 50.0), (3, 0.5, 9.0)])
def test_every_agreed_budget_has_something_left(dimension: int, smallest: float, largest: float) -> None:
    """Few coordinates: a scaled vector under one step rounds to a square of 0, which loses nothing and all."""
    terms = small_terms(dimension=dimension, smallest_multiplier=smallest, largest_multiplier=largest)
    for multiplier in (smallest, math.sqrt(smallest * largest), largest):
        assert terms.lattice.norm(terms.square(multiplier)) > 0.97 * terms.lattice.steps * smallest / multiplier


def test_a_lattice_that_leaves_nothing_is_caught() -> None:
    """The mutant's measure of loss accepts two steps for a scale of 0.07, where nothing can be sent."""
    mutant = Lattice(1, 2)
    assert mutant.square(0.14) <= 1.01 * 0.14**2
    assert mutant.norm(mutant.square(0.14)) == 0.0
    assert finest_needed(1, 0.07, 0.01).steps > 100


def test_a_lattice_that_is_too_fine_to_draw_is_made_coarser() -> None:
    terms = small_terms(dimension=10**8, largest_multiplier=200.0, honest=1, clients=1)
    assert terms.share <= 2.0**36
    assert terms.multiplier(terms.square(2.0)) >= 2.0


def test_the_modulus() -> None:
    assert small_terms().bits == 32
    assert small_terms(units=10**7).bits == 64
    assert small_terms().wrap <= 1e-9
    assert wrap_probability(2.0**31, 10, 100.0, 32) == 1.0


def test_wrapping_is_as_rare_as_stated() -> None:
    """In a modulus of 8 bits: more wraps than the bound would allow would be seen."""
    from modicum.privacy.noise.skellam import skellam_table

    bound = wrap_probability(20.0, 1, 900.0, 8)
    draws = 20 + skellam_table(900.0).draw(200_000)
    share = np.mean((draws < -128) | (draws > 127))
    assert 0 < share <= bound < 0.02


def test_sums_that_nobody_can_have_made_are_rejected() -> None:
    terms = small_terms()
    square = terms.square(2.0)
    rows = quantise(np.repeat(unit_rows(1, 500), terms.clients, axis=0), terms.lattice, square, b"s")
    noise = sum(terms.table.draw(terms.lattice.dimension) for _ in range(terms.clients))
    total = rows.sum(axis=0) + noise
    terms.check_sum(total)
    hostile = total.copy()
    hostile[0] += int(2 * terms.largest_norm())
    with pytest.raises(UserError, match="void"):
        terms.check_sum(hostile)
    with pytest.raises(UserError, match="coordinates"):  # a mutant that only measures would let it pass
        terms.check_sum(total[:3])
    garbage = np.random.default_rng(0).integers(-(2**31), 2**31, terms.lattice.dimension)
    with pytest.raises(UserError, match="void"):
        terms.check_sum(garbage)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Lattice(0, 4),
        lambda: Lattice(4, 0),
        lambda: quantise(np.ones(3), Lattice(4, 4), 30, b""),
        lambda: quantise(np.array([1.0, math.nan]), Lattice(2, 4), 30, b""),
        lambda: small_terms(honest=0),
        lambda: small_terms(honest=11),
        lambda: small_terms(largest_multiplier=1.0),
        lambda: small_terms().square(1e9),
        lambda: finest_needed(10**6, 1e-9, 1e-9),
    ],
)
def test_refusals(bad: object) -> None:
    with pytest.raises(UserError) as info:
        bad()  # type: ignore[operator]
    assert "\n" not in str(info.value)
