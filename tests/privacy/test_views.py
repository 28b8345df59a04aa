"""Each view owns its rules, and one that forgets a rule cannot be made."""

from dataclasses import dataclass
from typing import Any

import pytest

from modicum.errors import UnsoundError, UserError
from modicum.privacy.accounting import hidden_rate
from modicum.privacy.accounting.filters import filter_cost
from modicum.privacy.events import Block, Poisson, Release
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import (
    Adjacency,
    KnownTo,
    SecureAggregation,
    ServerSeesMessages,
    Shows,
    TrustedServer,
    Unit,
    View,
    view_from_dict,
)

VIEWS = [ServerSeesMessages(), SecureAggregation(10, 2, 1), TrustedServer()]


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.to_dict()["kind"])
class TestEveryView:
    def test_is_read_back_from_what_it_writes(self, view: View) -> None:
        assert view_from_dict(view.to_dict()) == view

    def test_filter_and_plan_take_the_same_rate_and_noise(self, view: View) -> None:
        """A filter that amplified where the plan does not would certify too little."""
        spec = PrivacySpec(unit=Unit.CLIENT, view=view)
        plan = PrivacyPlan(client="a", spec=spec, budget=1.0, guard=Guard.RDP_FILTER, order=8.0)
        for known_to in KnownTo:
            sampler = Poisson(0.1, known_to)
            release = Release(client="a", round=0, spec=spec, blocks=(Block("b", 1.0, 2.0),), sampler=sampler)
            amplified = filter_cost(plan, release) < filter_cost(plan, _unsampled(release))
            assert amplified == (hidden_rate(sampler, spec) < 1) == (known_to in view.hides)
            planned = PlannedRelease("b", 2.0, sampler, 1)
            assert spec.seen(planned.noise_multiplier) == spec.seen(release.noise_multiplier)

    def test_own_and_seen_noise_are_inverse(self, view: View) -> None:
        spec = PrivacySpec(unit=Unit.CLIENT, view=view)
        assert spec.seen(spec.own(3.0)) == pytest.approx(3.0)


def _unsampled(release: Release) -> Release:
    return Release(
        client="a", round=0, spec=release.spec, blocks=release.blocks, sampler=Poisson(1.0, KnownTo.EVERYONE)
    )


@dataclass(frozen=True)
class Forgetful(View):
    """A fourth view whose author forgot to say whose coins it hides."""

    shows = Shows.SUM
    senders_add_noise = True
    noise_shares = 1
    assumption = ""

    def enough(self, answered: int, invited: int) -> bool:
        return answered == invited

    def refuse(self, unit: Unit, adjacency: Adjacency) -> None: ...

    def sentence(self) -> str:
        return "somebody"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "forgetful"}


def test_a_view_that_forgets_a_rule_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="hides"):
        Forgetful()  # type: ignore[abstract]


def test_a_view_of_another_version_is_refused() -> None:
    with pytest.raises(UserError, match="unknown view"):
        view_from_dict({"kind": "forgetful"})


@pytest.mark.parametrize(
    ("unit", "adjacency", "view"),
    [
        (Unit.CLIENT, Adjacency.ADD_REMOVE, ServerSeesMessages()),
        (Unit.RECORD, Adjacency.ADD_REMOVE, SecureAggregation(10)),
        (Unit.CLIENT, Adjacency.REPLACE_ONE, SecureAggregation(10)),
        (Unit.RECORD, Adjacency.ZERO_OUT, TrustedServer()),
    ],
)
def test_a_view_refuses_what_it_cannot_protect(unit: Unit, adjacency: Adjacency, view: View) -> None:
    with pytest.raises(UnsoundError):
        PrivacySpec(unit=unit, adjacency=adjacency, view=view)


def test_replace_one_is_charged_at_half_the_noise() -> None:
    zero, replaced = (
        PrivacySpec(unit=Unit.RECORD, adjacency=a) for a in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE)
    )
    assert (zero.charged(4.0), replaced.charged(4.0)) == (4.0, 2.0)


def test_shares_of_noise_count_only_those_who_are_certain_to_be_there() -> None:
    assert SecureAggregation(10, colluding=2, dropouts=1).noise_shares == 7
    assert not SecureAggregation(10, dropouts=1).enough(8, 10)
    assert SecureAggregation(10, dropouts=1).enough(9, 10)
