"""Correlated noise in ledger, certificate and verification: one Gaussian, and a promise that the guard keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import forger
import pytest

from modicum.errors import UserError
from modicum.privacy import second_opinion
from modicum.privacy.accounting import epsilon, gdp
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.certificate import Certificate
from modicum.privacy.correlated import Correlation
from modicum.privacy.events import Block, NoSampling, Poisson, Release
from modicum.privacy.factors import Participation, Workload, optimised_blt, sensitivity, square_root
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.budgets import Reason, Refused, guard_for, noise_problems
from modicum.privacy.lifetime.grant import Filter, Lifetime
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, TrustedServer, Unit
from modicum.privacy.verify import verify
from modicum.privacy.views import KnownTo, ServerSeesMessages

SPEC = PrivacySpec(unit=Unit.CLIENT, view=TrustedServer())
TAKING = Participation(steps=30, separation=5, most=6)
TERMS = Correlation.of(square_root(5), TAKING)
BUDGET = 2.0
Z = calibrate_noise(SPEC, BUDGET, NoSampling(), TAKING.most)


def planned(terms: Correlation = TERMS, **changes: object) -> PlannedRelease:
    return replace(PlannedRelease("update", Z, NoSampling(), TAKING.most, correlated=terms), **changes)  # type: ignore[arg-type]


def plan(release: PlannedRelease | None = None, client: str = "a") -> PrivacyPlan:
    return PrivacyPlan(client=client, spec=SPEC, budget=BUDGET, releases=(release or planned(),))


def release(round: int, client: str = "a", bound: float = 1.0, less: float = 1.0) -> Release:
    rows = TERMS.rows
    blocks = (Block("update", bound, Z * rows.scale * less),)
    return Release(client=client, round=round, spec=SPEC, blocks=blocks, sampler=NoSampling(), correlated=rows)


def test_the_whole_run_is_one_gaussian() -> None:
    sigma, moved = Z * TERMS.scale, sensitivity(TERMS.factor, TAKING)
    assert plan_guarantee(plan()).epsilon == pytest.approx(gdp.epsilon_from_mu(moved / sigma, 1e-5), rel=1e-9)
    assert second_opinion.plan_epsilon(plan(), BUDGET) == pytest.approx(BUDGET, rel=0.01)
    assert release(0).noise_multiplier == pytest.approx(Z, rel=1e-12)
    # Nor do the releases on their own cost less than the plan says.
    assert epsilon([release(t) for t in range(0, 30, 5)], SPEC).epsilon == pytest.approx(BUDGET, rel=1e-3)


def test_replace_one_moves_twice_as_far() -> None:
    twice = replace(SPEC, adjacency=Adjacency.REPLACE_ONE)
    own = replace(plan(), spec=twice, budget=10.0)
    moved = sensitivity(TERMS.factor, TAKING) / (Z * TERMS.scale)
    assert plan_guarantee(own).epsilon == pytest.approx(gdp.epsilon_from_mu(2 * moved, 1e-5), rel=1e-9)


def test_the_guard_keeps_separation_count_and_noise(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", "r", SimulatedNoise(0)) as ledger:
        ledger.declare([plan()])
        ledger.reserve([release(0, bound=3.0)])
        for round, why in ((4, Reason.TOO_EARLY), (30, Reason.TOO_EARLY)):
            with pytest.raises(Refused) as refused:
                ledger.reserve([release(round)])
            assert refused.value.reason is why
        with pytest.raises(Refused, match="not-planned"):
            ledger.reserve([release(5, less=0.99)])
        with pytest.raises(Refused, match="not-planned"):  # its own noise in place of the plan's rows
            ledger.reserve([replace(release(5), correlated=None)])
        with pytest.raises(Refused, match="one row"):
            ledger.reserve([replace(release(5), count=2)])
        for round in (5, 11, 16, 21, 26):
            ledger.reserve([release(round, bound=0.1)])
        ledger.reserve([release(26, bound=0.1)])  # the same again is the same entry
        assert ledger.left() == {"a": 0.0}
    # What the guard remembers is in the file.
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger, pytest.raises(Refused):
        ledger.reserve([release(29)])


def test_a_filter_and_a_hidden_cohort_take_no_correlated_noise() -> None:
    filtered = PrivacyPlan(client="a", spec=SPEC, budget=BUDGET, guard=Guard.GDP_FILTER)
    refusal = guard_for(filtered).refusal(release(0))
    assert refusal is not None
    assert refusal.reason is Reason.NO_SOUND_CHARGE
    assert noise_problems(plan(planned(sampler=Poisson(0.1, KnownTo.SERVER))))
    seen = replace(plan(), spec=replace(SPEC, view=ServerSeesMessages()))
    assert "one party" in noise_problems(seen)[0]


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        (replace(TERMS, scale=TERMS.scale * 0.99), "sensitivity asks for"),
        (replace(TERMS, separation=4), "room|sensitivity asks for"),
        (replace(TERMS, steps=20), "room for 4"),
    ],
)
def test_a_plan_whose_scale_is_too_small_is_refused(tmp_path: Path, terms: Correlation, why: str) -> None:
    ledger = Ledger.create(tmp_path / "ledger.sqlite", "r", SimulatedNoise(0))
    with ledger, pytest.raises(UserError, match=why):
        ledger.declare([plan(planned(terms))])


def make(folder: Path) -> Path:
    folder.mkdir()
    with Ledger.create(folder / "ledger.sqlite", "r", SimulatedNoise(0)) as ledger:
        ledger.declare([plan(client=name) for name in "ab"])
        for t in (0, 5, 10):
            ledger.reserve([release(t, name) for name in "ab"])
        Certificate.from_ledger(ledger).write(folder / "certificate.json")
    return folder


def test_certificate_and_verification(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    outcome = verify(folder)
    assert outcome.matches, outcome
    line = Certificate.read(folder / "certificate.json").clients["a"]
    assert line.correlated is not None
    said = line.correlated["update"]
    assert said["factor"] == TERMS.digest
    assert said["mu"] == pytest.approx(math.sqrt(TAKING.most) / Z)
    assert (said["separation"], said["participations"], said["steps"]) == (5, 6, 30)
    assert any("correlated" in text for text in Certificate.read(folder / "certificate.json").assumptions)


def test_verification_recomputes_the_sensitivity(tmp_path: Path) -> None:
    """Negative control: a forger lowers the scale in plans and releases alike, and certifies again."""
    folder = make(tmp_path / "run")
    scale = repr(TERMS.scale)
    rows = forger.rows_of(folder / "ledger.sqlite")
    changed = [replace(row, body=row.body.replace(f'"scale":{scale}', '"scale":0.5')) for row in rows]
    assert changed != rows
    forger.write(folder / "ledger.sqlite", [row.keyed() for row in changed])
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        Certificate.from_ledger(ledger).write(folder / "certificate.json")
    outcome = verify(folder)
    assert not outcome.matches
    assert all("sensitivity asks for" in "; ".join(check.problems) for check in outcome.clients)


def test_verification_sees_a_client_that_came_too_early(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    rows = forger.rows_of(folder / "ledger.sqlite")
    changed = [replace(row, body=row.body.replace('"round":10', '"round":8')) for row in rows]
    forger.write(folder / "ledger.sqlite", [row.keyed() for row in changed])
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        Certificate.from_ledger(ledger).write(folder / "certificate.json")
    assert all("too-early" in "; ".join(check.problems) for check in verify(folder).clients)


def test_a_blt_is_priced_with_its_overlaps() -> None:
    """Rows of a BLT overlap: charging them as if they did not would be too little."""
    factor = optimised_blt(TAKING, Workload.constant(30))
    terms = Correlation.of(factor, TAKING)
    assert terms.scale > 1.02 * sensitivity(factor, Participation(30, 5, 1))
    own = plan(planned(terms))
    assert not noise_problems(own)
    assert second_opinion.plan_epsilon(own, BUDGET) == pytest.approx(plan_guarantee(own).epsilon, rel=0.01)


def test_a_lifetime_account_is_charged_the_one_gaussian() -> None:
    mu = sensitivity(TERMS.factor, TAKING) / (Z * TERMS.scale)
    grant = {"unit": Unit.CLIENT, "adjacency": Adjacency.ZERO_OUT, "budget": 8.0, "delta": 1e-5}
    assert Lifetime(**grant, filter=Filter.GDP).price(plan()) == pytest.approx(mu**2, rel=1e-9)
    assert Lifetime(**grant, filter=Filter.RDP, order=8.0).price(plan()) == pytest.approx(4.0 * mu**2, rel=1e-9)
