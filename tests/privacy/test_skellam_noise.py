"""The sampler: its table against exact arithmetic, its draws against the distribution, its rare path by hand."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from scipy.special import ive
from scipy.stats import chi2

from modicum.errors import UserError
from modicum.privacy.accounting.skellam_tables import chernoff, delta_charge, last_entry
from modicum.privacy.noise.skellam import LARGEST_VARIANCE, SkellamTable, _masses, skellam_table

FALSE_ALARM = 1e-6


def exact_fractions(variance: Fraction, count: int) -> list[Fraction]:
    """P(|X| ≤ x) for x under `count`, by the power series of I_x in 70 digits: another way than the table's."""
    with localcontext() as context:
        context.prec = 70
        half = Decimal(variance.numerator) / Decimal(variance.denominator) / 2
        masses = []
        for x in range(count):
            term = half**x / math.factorial(x)
            total = term
            for k in range(1, 2000):
                term *= half * half / (k * (k + x))
                total += term
                if term < total * Decimal(10) ** -65:
                    break
            masses.append(total * (-2 * half).exp())
        running, result = Decimal(0), []
        for x, mass in enumerate(masses):
            running += mass if x == 0 else 2 * mass
            result.append(Fraction(running))
    return result


def entries(table: SkellamTable, count: int) -> list[Fraction]:
    words = zip(table.high[:count], table.low[:count], strict=True)
    return [Fraction((int(high) << 64) + int(low), 1 << 128) for high, low in words]


@pytest.mark.parametrize("variance", [0.25, 1.0, 7.3, 250.0])
def test_the_table_is_as_exact_as_it_says(variance: float) -> None:
    table = skellam_table(variance)
    count = min(len(table.high), 200)
    worst = max(
        abs(a - b) for a, b in zip(entries(table, count), exact_fractions(Fraction(variance), count), strict=True)
    )
    assert worst <= table.distance <= 2.0**-100


def test_a_table_in_doubles_is_caught() -> None:
    """The same check refuses a table whose probabilities were computed in floating point."""
    exact = exact_fractions(Fraction(7.3), 40)
    floating = np.cumsum(np.concatenate([ive([0], 7.3), 2 * ive(np.arange(1, 40), 7.3)]))
    assert max(abs(Fraction(float(a)) - b) for a, b in zip(floating, exact, strict=True)) > 2.0**-60


@pytest.mark.parametrize("variance", [0.01, 4.0, 1000.0, 1e6])
def test_no_floor_loses_more_than_it_says(variance: float) -> None:
    """The sequence begins at 2^160 and sinks to 2N/μ of it, no further; 2^160 is not its least value."""
    last = last_entry(variance)
    least = min(_masses(Fraction(variance), last))
    assert least >= (2**160 * min(Fraction(1), 2 * last / Fraction(variance))) - 1
    assert least > 2**146
    assert variance < 1000 or least < 2**160


def test_the_widest_table_loses_no_more() -> None:
    assert min(1, 2 * last_entry(LARGEST_VARIANCE) / LARGEST_VARIANCE) > 2.0**-14


def test_every_table_keeps_its_promise() -> None:
    assert skellam_table(2.0**30).distance < 2.0**-100
    with pytest.raises(UserError, match="coarser lattice"):
        skellam_table(LARGEST_VARIANCE * 1.01)


def p_value(draws: np.ndarray, variance: float) -> float:
    """Chi-square over bins of at least 50 expected draws."""
    reach = math.ceil(14 * math.sqrt(variance)) + 30
    mass = ive(np.abs(np.arange(-reach, reach + 1)), variance)
    cuts, expected, running = [], [], 0.0
    for x, m in zip(range(-reach, reach + 1), mass, strict=True):
        running += m * len(draws)
        if running >= 50 and mass[x + reach + 1 :].sum() * len(draws) >= 50:
            cuts.append(x)
            expected.append(running)
            running = 0.0
    expected.append(running)
    seen = np.bincount(np.searchsorted(np.array(cuts), draws, side="left"), minlength=len(expected))
    return float(chi2.sf(np.sum((seen - expected) ** 2 / np.array(expected)), len(expected) - 1))


@pytest.mark.parametrize("variance", [0.25, 6.0, 400.0])
def test_draws_have_the_distribution(variance: float) -> None:
    assert p_value(skellam_table(variance).draw(200_000), variance) > FALSE_ALARM


def test_draws_of_a_smaller_variance_are_caught() -> None:
    assert p_value(skellam_table(370.0).draw(400_000), 400.0) < FALSE_ALARM


def test_shares_add_up_to_the_noise_that_is_counted() -> None:
    """The sum of five clients' draws is Skellam of five times the variance."""
    table = skellam_table(9.0)
    assert p_value(sum(table.draw(200_000) for _ in range(5)), 45.0) > FALSE_ALARM


def scripted(*parts: bytes) -> object:
    """A source that hands out prepared bytes, in the order and lengths that are asked for."""
    left = list(parts)

    def bits(size: int) -> bytes:
        part = left.pop(0)
        assert len(part) == size
        return part

    return bits


@pytest.mark.parametrize(("lower", "moves"), [(-1, 0), (0, 1), (1, 1)])
def test_ties_are_settled_by_another_64_bits(lower: int, moves: int) -> None:
    """A number that equals an entry's upper half: the lower half decides, and equality goes up."""
    table = skellam_table(6.0)
    x = 3
    word = int(table.high[x]).to_bytes(8, "little")
    rest = (int(table.low[x]) + lower).to_bytes(8, "little")
    drawn = table.draw(1, scripted(word, rest, b"\x00"))  # type: ignore[arg-type]
    assert drawn[0] == x + moves


def test_ties_among_many_entries() -> None:
    """In the tail many entries share their upper half."""
    table = skellam_table(400.0)
    top = np.flatnonzero(table.high == np.uint64(2**64 - 1))
    assert len(top) > 10
    for x in (top[0], top[5], top[-1]):
        rest = int(table.low[x]).to_bytes(8, "little")
        drawn = table.draw(1, scripted(b"\xff" * 8, rest, b"\x80"))  # type: ignore[arg-type]
        assert drawn[0] == -(x + 1)


def test_noise_comes_from_the_cryptographic_source() -> None:
    assert inspect.signature(SkellamTable.draw).parameters["bits"].default is os.urandom
    table = skellam_table(100.0)
    assert not np.array_equal(table.draw(1000), table.draw(1000))


def test_the_charge_to_delta() -> None:
    """100 releases of 2^24 coordinates by 25 clients at ε = 8: negligible, where 2^−60 a draw would cost 10^−4."""
    table = skellam_table(1e6)
    assert delta_charge(table.distance, 1 << 24, 25, 100, 8.0) < 1e-15
    assert delta_charge(2.0**-60, 1 << 24, 25, 100, 8.0) > 1e-4
    exact = (1 + math.exp(8.0)) * table.distance * 2**24 * 25 * 100
    assert delta_charge(table.distance, 1 << 24, 25, 100, 8.0) == pytest.approx(exact)
    with pytest.raises(UserError):
        delta_charge(2.0**-20, 1 << 24, 25, 100, 8.0)
    with pytest.raises(UserError):
        delta_charge(table.distance, 1 << 24, 25, 100, 800.0)


@pytest.mark.parametrize("variance", [0.5, 30.0, 1e6])
def test_chernoff_is_above_the_tail(variance: float) -> None:
    reach = math.ceil(9 * math.sqrt(variance)) + 20
    tail = np.cumsum(ive(np.arange(2 * reach), variance)[::-1])[::-1]
    for x in np.linspace(0, reach, 12).astype(int):
        if tail[x] > 1e-290:
            assert math.log(tail[x]) <= chernoff(variance, x) + 1e-12


@pytest.mark.parametrize("variance", [0.0, -1.0, math.inf, math.nan])
def test_refusals(variance: float) -> None:
    with pytest.raises(UserError):
        skellam_table(variance)


def test_a_table_cannot_be_mistaken_for_another() -> None:
    table = skellam_table(6.0)
    assert table == skellam_table(6.0)
    assert table != replace(table)
