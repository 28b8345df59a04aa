from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.parts import State
from modicum.errors import UserError
from modicum.papers.pac_dp.schedule import PlateauCosine
from modicum.policies import AdaptiveQuantile, Fixed


def test_plateau_then_cosine() -> None:
    """PAC-DP, Eq. (9), at T = 25, r_s = 0.6, λ_min = 0.1."""
    schedule = PlateauCosine(Fixed(2.0))
    state = schedule.init(PublicFacts((), 25, 1, {}))
    factors = [schedule.decide(state, t, ["a"])["a"].bound / 2.0 for t in range(25)]
    assert factors[:16] == [1.0] * 16  # the cosine's own first value is 1 as well
    assert factors[20] == pytest.approx(0.55)
    assert all(a > b for a, b in pairwise(factors[15:]))
    assert 0.1 < factors[-1] < 0.13


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("plateau", [0.0, 0.6, 1.0])
def test_short_runs(rounds: int, plateau: float) -> None:
    factors = [PlateauCosine(plateau=plateau).factor(t, rounds) for t in range(rounds)]
    assert factors[0] == 1.0
    assert all(0.1 <= f <= 1 for f in factors)


@dataclass(frozen=True)
class ByName(Fixed):
    """Another bound for each client, as a curve over budgets gives."""

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return {name: Decision(float(len(name)), 3.0) for name in clients}


def test_is_a_factor_on_any_bounds() -> None:
    schedule = PlateauCosine(ByName(), plateau=0.0, floor=0.5)
    state = schedule.init(PublicFacts((), 2, 1, {}))
    decisions = schedule.decide(state, 1, ["a", "bbb"])
    assert decisions["bbb"].bound == pytest.approx(3 * decisions["a"].bound)
    assert decisions["a"] == Decision(pytest.approx(0.75), 3.0)


def test_a_base_that_buys_signals_is_refused() -> None:
    with pytest.raises(UserError, match="before the run"):
        PlateauCosine(AdaptiveQuantile())


@pytest.mark.parametrize("settings", [{"plateau": -0.1}, {"plateau": 1.1}, {"floor": 0.0}, {"floor": 2.0}])
def test_bad_settings(settings: dict[str, float]) -> None:
    with pytest.raises(UserError):
        PlateauCosine(**settings)
