"""Correlated noise: a canary that comes as early as allowed stays under the claim, an earlier one is caught.

False alarms: 1e-6 for each audit, by the confidence of its bound.
"""

from __future__ import annotations

import pytest

from modicum.attacks.canary import Audit, audit
from modicum.core import release_gate
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.correlated import Correlated, Correlation
from modicum.privacy.events import Cyclic
from modicum.privacy.factors import Banded, Blt, Factor, FactorKind
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
    monkeypatch.setattr(Correlation, "too_early", lambda self, last, number: None)
    verdict = audit(EARLY)
    assert verdict.broken, verdict.sentence()


HEAVY = pytest.mark.heavy
BATCHES, RECORDS = 6, 24  # even, so that a canary's sign is the same in all its steps


def record_level(bands: int | None = None, kind: FactorKind | None = None) -> RecordLocal:
    return RecordLocal(batch=RECORDS // BATCHES, steps=1).correlate_steps(bands, kind, 0.0)


def own_steps(mechanism: RecordLocal, trials: int = 250) -> Audit:
    return Audit(mechanism=mechanism, budget=BUDGET, rounds=12, records=RECORDS, trials=trials)


@pytest.mark.parametrize("mechanism", [record_level(), pytest.param(record_level(kind="blt"), marks=HEAVY)])
def test_a_record_whose_batch_comes_in_turn_stays_under_the_claim(mechanism: RecordLocal) -> None:
    verdict = audit(own_steps(mechanism))
    assert not verdict.broken, verdict.sentence()
    assert verdict.proved.mu > 0.5


def test_a_record_in_every_second_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a gate that hands out two batches in turn, charged as if there were six."""
    honest = release_gate.batch_of
    first = next(t for t in range(BATCHES) if 0 in honest(t, Cyclic(BATCHES), RECORDS))
    monkeypatch.setattr(
        release_gate, "batch_of", lambda number, sampler, records: honest(first + number % 2, sampler, records)
    )
    verdict = audit(own_steps(record_level(), 600))
    assert verdict.broken, verdict.sentence()
