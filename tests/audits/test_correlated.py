"""Correlated noise: a canary that comes as early as allowed stays under the claim, an earlier one is caught.

False alarms: 1e-6 for each audit, by the confidence of its bound.
"""

from __future__ import annotations

import pytest

from modicum.attacks.canary import Audit, audit
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.privacy.correlated import Correlated, Correlation
from modicum.privacy.factors import Banded, Blt, Factor
from modicum.privacy.views import TrustedServer

SEPARATION, STEPS = 6, 30  # even, so that a canary's sign is the same in all its rounds
FLAT = Banded((1.0,) * SEPARATION)  # whose overlaps are largest
BUDGET = 10.0


def client_level(factor: Factor) -> ClientLevel:
    return ClientLevel(view=TrustedServer(), correlated=Correlated(factor, STEPS, SEPARATION))


@pytest.mark.parametrize("factor", [FLAT, Banded(), Blt((0.8,), (0.6,))], ids=["banded", "identity", "blt"])
def test_a_canary_at_the_allowed_separation_stays_under_the_claim(factor: Factor) -> None:
    what = Audit(mechanism=client_level(factor), budget=BUDGET, rounds=18, cohort=SEPARATION, trials=250)
    verdict = audit(what)
    assert not verdict.broken, verdict.sentence()
    assert verdict.proved.mu > 0.5  # of 2: the attack is a good one


EARLY = Audit(mechanism=client_level(FLAT), budget=BUDGET, rounds=10, cohort=2, trials=1200)


def test_a_canary_that_comes_too_early_is_refused() -> None:
    with pytest.raises(UserError, match="refused"):
        audit(EARLY)


def test_without_the_guard_a_canary_that_comes_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: participations 2 apart, charged as if they were 6 apart."""
    monkeypatch.setattr(Correlation, "too_early", lambda self, last, number: None)  # noqa: ARG005
    verdict = audit(EARLY)
    assert verdict.broken, verdict.sentence()
