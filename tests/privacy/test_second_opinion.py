"""dp-accounting's opinion on plans, with its traps kept away (R6)."""

import math

import dp_accounting
import pytest
from dp_accounting import NeighboringRelation

from modicum.privacy import accounting
from modicum.privacy.events import NoSampling, Poisson
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.second_opinion import plan_epsilon
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, ServerSeesMessages, TrustedServer, Unit
from modicum.privacy.views import KnownTo

RECORD = PrivacySpec(unit=Unit.RECORD)
REPLACE = PrivacySpec(unit=Unit.RECORD, adjacency=Adjacency.REPLACE_ONE)
TEN = (PlannedRelease("u", 1.0, NoSampling(), 10),)


def opinion(spec: PrivacySpec, *releases: PlannedRelease) -> float:
    return plan_epsilon(PrivacyPlan(client="a", spec=spec, budget=1e3, releases=releases))


def test_the_trap_is_there() -> None:
    """dp-accounting's RDP accountant ignores that a replacement moves a plain Gaussian's sum twice as far."""
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), 10)
    naive = dp_accounting.rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    assert naive.compose(event).get_epsilon(1e-5) == pytest.approx(19.05, abs=0.01)
    assert accounting.epsilon(TEN, RECORD).epsilon == pytest.approx(17.86, abs=0.01)


def test_the_trap_is_closed() -> None:
    assert accounting.epsilon(TEN, REPLACE).epsilon == pytest.approx(46.21, abs=0.01)
    assert opinion(REPLACE, *TEN) == pytest.approx(46.21, rel=2e-3)


@pytest.mark.parametrize("spec", [RECORD, REPLACE], ids=["zero-out", "replace-one"])
def test_opinions_on_a_mixture(spec: PrivacySpec) -> None:
    mixture = (
        PlannedRelease("u", 1.5, Poisson(0.05, KnownTo.CLIENT), 60),
        PlannedRelease("u", 12.0, NoSampling(), 5),
        PlannedRelease("u", 3.0, Poisson(0.2, KnownTo.CLIENT), 10),
    )
    assert opinion(spec, *mixture) == pytest.approx(accounting.epsilon(mixture, spec).epsilon, rel=2e-3)


@pytest.mark.parametrize("view", [ServerSeesMessages(), TrustedServer(), SecureAggregation(50, 1)], ids=str)
def test_what_the_adversary_sees_of_coins_and_shares(view: object) -> None:
    """Coins that the server knows amplify behind a trusted server alone; of 50 shares of noise 49 count."""
    spec = PrivacySpec(unit=Unit.CLIENT, view=view)  # type: ignore[arg-type]
    known = PlannedRelease("u", 2.0, Poisson(0.1, KnownTo.SERVER), 3)
    z = 2.0 * (math.sqrt(49) if isinstance(view, SecureAggregation) else 1.0)
    plain = dp_accounting.pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    unsampled = plain.compose(dp_accounting.GaussianDpEvent(z), 3).get_epsilon(1e-5)
    if isinstance(view, TrustedServer):
        assert opinion(spec, known) < 0.5 * unsampled
    else:
        assert opinion(spec, known) == pytest.approx(unsampled, rel=2e-3)
