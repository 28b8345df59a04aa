"""A stock of planned kinds (R11): an adaptive order costs what the product costs, computed exactly on small cases.

Each kind is a sampled Gaussian whose output is told in a few cells, so that everything is a finite sum. The
adversary's best strategy is found by going through all of them: before each step it looks at the outcomes so far
and takes any kind that the package's own guard still allows, or stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest

from modicum.errors import UnsoundError, UserError
from modicum.privacy import accounting
from modicum.privacy.accounting.calibration import DIGITS, calibrate_kinds, calibrate_noise
from modicum.privacy.accounting.pairs import Direction, Pair, directions
from modicum.privacy.events import Block, NoSampling, Origin, Poisson, Release, Sampler
from modicum.privacy.ledger import budgets
from modicum.privacy.ledger.budgets import BudgetGuard, PlanGuard, Reason, guard_for
from modicum.privacy.noise.filtered import filtered_noise
from modicum.privacy.noise.stock import Stock
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit
from modicum.privacy.views import KnownTo

RECORD = PrivacySpec(unit=Unit.RECORD)
RATE = 0.3
SECRET = Poisson(RATE, KnownTo.CLIENT)
NOISES = (0.7, 1.0, 1.4)
EPSILONS = (0.05, 0.1, 0.3, 0.6)
Cells = tuple[tuple[float, float], ...]  # P and Q of each outcome


def told(z: float, direction: Direction, cells: int = 4) -> Cells:
    """A sampled Gaussian of which one learns the cell that its loss lies in."""
    pair = Pair(direction, z, RATE)
    losses = np.quantile(pair.loss(np.linspace(-3, 4, 4001)), np.linspace(0, 1, cells + 1))[1:-1]
    x = np.sort(pair.x_of_loss(losses))
    edges = np.concatenate([[-np.inf], x, [np.inf]])

    def masses(parts: tuple[tuple[float, float], ...]) -> np.ndarray:
        from scipy.special import ndtr

        return sum(w * np.diff(ndtr((edges - c) / z)) for w, c in parts)  # type: ignore[return-value]

    return tuple(zip(masses(pair._first).tolist(), masses(pair._second).tolist(), strict=True))


def plan(counts: tuple[int, ...]) -> PrivacyPlan:
    kinds = zip(NOISES, counts, strict=True)
    releases = tuple(PlannedRelease("gradient", z, SECRET, n) for z, n in kinds if n)
    return PrivacyPlan(client="a", spec=RECORD, budget=100.0, releases=releases)


def one(z: float, origin: Origin = Origin.PLANNED, round: int = 0, count: int = 1) -> Release:
    return Release(
        client="a",
        round=round,
        spec=RECORD,
        blocks=(Block("gradient", 1.0, z),),
        sampler=SECRET,
        noise_origin=origin,
        count=count,
    )


def best_delta(guard: BudgetGuard, direction: Direction, epsilon: float, steps: int) -> float:
    """sup of δ(ε) over all adaptive strategies of at most so many steps that the guard allows."""
    outcomes = {z: told(z, direction) for z in NOISES}

    @cache
    def best(p: float, q: float, guard: BudgetGuard, left: int) -> float:
        found = max(0.0, p - math.exp(epsilon) * q)  # stop here
        for z in NOISES if left else ():
            if guard.refusal(one(z)) is None:
                after = guard.charge(one(z))
                found = max(found, math.fsum(best(p * a, q * b, after, left - 1) for a, b in outcomes[z]))
        return found

    return best(1.0, 1.0, guard, steps)


def product_delta(counts: tuple[int, ...], direction: Direction, epsilon: float) -> float:
    kinds = [told(z, direction) for z, n in zip(NOISES, counts, strict=True) for _ in range(n)]
    total = []
    for path in product(*kinds):
        p, q = math.prod(a for a, _ in path), math.prod(b for _, b in path)
        total.append(max(0.0, p - math.exp(epsilon) * q))
    return math.fsum(total)


@pytest.mark.parametrize("direction", directions(Adjacency.ZERO_OUT))
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 0, 1), (1, 2, 0)], ids=str)
def test_an_adaptive_order_with_early_stops_costs_no_more_than_the_product(
    counts: tuple[int, ...], direction: Direction
) -> None:
    for epsilon in EPSILONS:
        adaptive = best_delta(guard_for(plan(counts)), direction, epsilon, steps=4)
        assert adaptive <= product_delta(counts, direction, epsilon) * (1 + 1e-12)
        assert adaptive >= 0.999 * product_delta(counts, direction, epsilon)  # using all of it is one strategy


def test_replace_one_as_well() -> None:
    adaptive = best_delta(guard_for(plan((1, 1, 1))), Direction.REPLACE, 1.0, steps=4)
    assert adaptive <= product_delta((1, 1, 1), Direction.REPLACE, 1.0) * (1 + 1e-12)


class Generous(PlanGuard):
    """The negative control: the last of a kind may be taken once too often."""

    def refusal(self, release: Release) -> budgets.Refusal | None:
        return None if sum(self.left) > 0 else super().refusal(release)

    def charge(self, release: Release) -> Generous:
        at = next(i for i, n in enumerate(self.left) if n)
        return Generous(self.plan, tuple(n - (i == at) for i, n in enumerate(self.left)))


@pytest.mark.parametrize("direction", directions(Adjacency.ZERO_OUT))
def test_a_kind_taken_once_too_often_is_caught(direction: Direction) -> None:
    counts = (1, 1, 1)
    broken = best_delta(Generous(plan(counts), counts), direction, 0.3, steps=3)
    assert broken > 1.05 * product_delta(counts, direction, 0.3)


def test_the_realised_spend_of_an_early_stop_is_no_guarantee() -> None:
    """R3: after a stop chosen by outcomes, the releases made cost less than they leak."""
    direction, epsilon = Direction.REMOVE, 0.3
    outcomes = told(0.7, direction)
    hot = max(outcomes, key=lambda c: c[0] / c[1])
    # Stop after the outcome that says most: one step was made where two were in play.
    leaked = math.fsum(
        max(0.0, p - math.exp(epsilon) * q)
        for a, b in outcomes
        for p, q in ([(a, b)] if (a, b) == hot else [(a * c, b * d) for c, d in outcomes])
    )
    once = product_delta((1, 0, 0), direction, epsilon)
    assert once < leaked <= product_delta((2, 0, 0), direction, epsilon) * (1 + 1e-12)
    with pytest.raises(UnsoundError, match="R11"):
        accounting.epsilon([one(0.7)], RECORD)


def test_a_kind_is_used_as_often_as_it_is_listed() -> None:
    guard = guard_for(plan((1, 2, 1)))
    for z in (1.0, 0.7, 1.0):
        assert guard.refusal(one(z)) is None
        guard = guard.charge(one(z))
    assert guard.stock_left() == (0.0, 0.0, 1.0)
    for z in (0.7, 1.0):
        refusal = guard.refusal(one(z))
        assert refusal is not None
        assert refusal.reason is Reason.PLAN_EXHAUSTED
    assert guard.refusal(one(1.4)) is None


@pytest.mark.parametrize("z", [0.69, 0.8, 1.2, 5.0])
def test_a_kind_that_is_not_listed_is_refused(z: float) -> None:
    refusal = guard_for(plan((1, 1, 1))).refusal(one(z))
    assert refusal is not None
    assert refusal.reason is Reason.NOT_PLANNED


# Calibration of mixtures.

ORACLES = [(1.0, 6.796, 7.719, 7.411), (2.0, 3.718, 4.258, 4.018), (8.0, 1.316, 1.579, 1.399)]


@pytest.mark.parametrize(("epsilon", "fixed", "mixed", "filtered"), ORACLES)
def test_oracles(epsilon: float, fixed: float, mixed: float, filtered: float) -> None:
    coins, count = Poisson(64 / 600, KnownTo.CLIENT), 281
    z = calibrate_noise(RECORD, epsilon, coins, count)
    assert z == pytest.approx(fixed, rel=1e-3)
    assert calibrate_kinds(RECORD, epsilon, coins, ((0.7, 140), (1.4, 141))) == pytest.approx(mixed, rel=1e-3)
    from modicum.privacy.accounting import rdp

    order = rdp.best_order(coins.rate, z, count, 1e-5)
    cap = rdp.filter_cap(epsilon, 1e-5, order)
    assert filtered_noise(cap, order, coins.rate, 1.0, count) == pytest.approx(filtered, rel=1e-3)


@pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE])
@pytest.mark.parametrize("sampler", [NoSampling(), Poisson(0.05, KnownTo.CLIENT)], ids=["whole", "poisson"])
@pytest.mark.parametrize("also", [(), (PlannedRelease("accuracy", 60.0, NoSampling(), 20),)], ids=["", "metrics"])
def test_a_mixture_meets_its_budget_and_wastes_nothing(
    adjacency: Adjacency, sampler: Sampler, also: tuple[PlannedRelease, ...]
) -> None:
    spec, kinds = PrivacySpec(unit=Unit.RECORD, adjacency=adjacency), ((0.7, 40), (1.0, 30), (1.4, 30))
    z = calibrate_kinds(spec, 2.0, sampler, kinds, also)

    def cost(z: float) -> float:
        listed = [PlannedRelease("gradient", s * z, sampler, n) for s, n in kinds]
        return accounting.epsilon([*listed, *also], spec).epsilon

    assert cost(z) <= 2.0 < cost(z * (1 - 8e-4))
    assert float(f"{z:.{DIGITS}g}") == z


def test_one_kind_is_the_plain_calibration() -> None:
    assert calibrate_kinds(RECORD, 1.0, SECRET, ((1.0, 50),)) == calibrate_noise(RECORD, 1.0, SECRET, 50)
    assert calibrate_kinds(RECORD, 1.0, NoSampling(), ((0.5, 50),)) == pytest.approx(
        2 * calibrate_noise(RECORD, 1.0, NoSampling(), 50), rel=1e-4
    )


@pytest.mark.parametrize("total", [3, 4, 7, 100])
@pytest.mark.parametrize("shares", [(), (0.6, 0.3, 0.1)])
def test_participations_are_divided_without_rest(total: int, shares: tuple[float, ...]) -> None:
    counts = Stock(shares=shares).participations(total)
    assert sum(counts) == total
    assert min(counts) >= 1
    kinds = [Stock(shares=shares).in_turn(total, i) for i in range(total)]
    assert [kinds.count(k) for k in range(3)] == list(counts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stock(()),
        lambda: Stock((1.0, -1.0)),
        lambda: Stock((1.0, 1.0)),
        lambda: Stock((1.0, math.inf)),
        lambda: Stock((0.7, 1.4), (1.0,)),
        lambda: Stock().participations(2),
    ],
)
def test_nonsense_is_refused_in_one_line(make: Callable[[], object]) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert "\n" not in str(error.value)
