"""Clipping curves: positive, never falling, clamped, on any input; and files that cannot be mistaken."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.facts import ClientFacts, PublicFacts
from modicum.errors import UserError
from modicum.papers.pac_dp.curve import (
    BudgetCurve,
    ClampedBudgetWarning,
    Curve,
    ScaleFreeCurve,
    quietness,
    read_curve,
)
from modicum.papers.pac_dp.quadratic import PUBLISHED, PrintedQuadratic

CURVE = Curve((0.1, 1.0, 10.0), (0.2, 0.2, 2.0))
POSITIVE = st.floats(1e-300, 1e300)


def public(*budgets: float, z: float = 2.0, records: int = 100) -> PublicFacts:
    clients = tuple(ClientFacts(f"c{i}", records, b, 5) for i, b in enumerate(budgets))
    return PublicFacts(clients, rounds=10, dimension=25, multipliers={c.name: z for c in clients})


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    inputs = sorted(draw(st.sets(st.floats(1e-6, 1e6), min_size=1, max_size=8)))
    bounds = sorted(draw(st.lists(st.floats(1e-6, 1e6), min_size=len(inputs), max_size=len(inputs))))
    return Curve(tuple(inputs), tuple(bounds))


@settings(max_examples=200, deadline=None)
@given(curves(), POSITIVE, POSITIVE)
def test_positive_and_never_falling_on_any_input(curve: Curve, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0 < curve.bounds[0] <= curve(low) <= curve(high) <= curve.bounds[-1]


def test_the_published_curve_is_caught_by_the_same_check() -> None:
    """The negative control: PAC-DP's printed quadratic falls beyond ε = 1.09 and turns negative."""
    printed = PrintedQuadratic(PUBLISHED["mnist"], "the paper's mnist fit")
    assert printed.bound(2.0) < printed.bound(1.0)
    with pytest.raises(UserError, match="no bound"):
        printed.bound(5.0)


def test_clamps_beyond_its_ends_and_says_so() -> None:
    assert CURVE(0.001) == 0.2
    assert CURVE(math.inf) == 2.0
    with pytest.warns(ClampedBudgetWarning, match="20"):
        state = BudgetCurve(CURVE).init(public(1.0, 20.0))
    assert state["bounds"] == {"c0": 0.2, "c1": 2.0}


def test_is_straight_in_the_logarithm_between_knots() -> None:
    assert CURVE(math.sqrt(10)) == pytest.approx(1.1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_what_is_no_budget_is_refused(value: float) -> None:
    with pytest.raises(UserError, match="positive"):
        CURVE(value)


@pytest.mark.parametrize(
    ("inputs", "bounds"),
    [((1.0, 2.0), (2.0, 1.0)), ((2.0, 1.0), (1.0, 2.0)), ((1.0,), (0.0,)), ((1.0,), (math.nan,)), ((), ())],
)
def test_a_curve_that_falls_or_is_not_positive_is_refused(
    inputs: tuple[float, ...], bounds: tuple[float, ...]
) -> None:
    with pytest.raises(UserError):
        Curve(inputs, bounds)


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    CURVE.write(tmp_path / "f.json")
    assert read_curve(tmp_path / "f.json") == CURVE


@pytest.mark.parametrize("damage", ["not json", "{}", '{"format": "modicum-clipping-curve-1"}'])
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, damage: str) -> None:
    (tmp_path / "f.json").write_text(damage)
    with pytest.raises(UserError, match="fit-clipping"):
        read_curve(tmp_path / "f.json")


def test_a_falling_curve_in_a_file_is_refused(tmp_path: Path) -> None:
    CURVE.write(tmp_path / "f.json")
    found = json.loads((tmp_path / "f.json").read_text())
    (tmp_path / "f.json").write_text(json.dumps({**found, "bounds": [3, 2, 1]}))
    with pytest.raises(UserError, match="must not fall"):
        read_curve(tmp_path / "f.json")


def test_scale_free_follows_noise_and_scale() -> None:
    free = Curve((1.0, 100.0), (0.5, 1.5), scale_free=True)
    loud = ScaleFreeCurve(free, 2.0).init(public(1.0, z=10.0))["bounds"]["c0"]
    quiet = ScaleFreeCurve(free, 2.0).init(public(1.0, z=0.4))["bounds"]["c0"]
    assert loud < quiet
    assert quiet == pytest.approx(2.0 * free(quietness(0.4, 25, 100)))


def test_the_two_kinds_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(UserError, match="scale-free"):
        BudgetCurve(Curve((1.0,), (1.0,), scale_free=True))
    with pytest.raises(UserError, match="leave its scale out"):
        ScaleFreeCurve(CURVE, 1.0)
