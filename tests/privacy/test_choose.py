import math
from dataclasses import replace

import pytest

from modicum.errors import UnsoundError, UserError
from modicum.privacy import accounting
from modicum.privacy.accounting import Guarantee, gdp, pld
from modicum.privacy.accounting.choose import shown
from modicum.privacy.accounting.gaussians import Gaussians, hidden_rate, normal_form
from modicum.privacy.events import Block, NoSampling, Origin, Poisson, Release, Shuffled
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import (
    Adjacency,
    PrivacySpec,
    SecureAggregation,
    ServerSeesMessages,
    TrustedServer,
    Unit,
)
from modicum.privacy.views import KnownTo

RECORD = PrivacySpec(unit=Unit.RECORD)
UNSAMPLED = NoSampling()
HIDDEN = Poisson(0.1, KnownTo.CLIENT)


def release(spec=RECORD, sampler=UNSAMPLED, z=2.0, count=10, bound=1.0, **changes):
    return Release(
        client="a",
        round=0,
        spec=spec,
        blocks=(Block("update", bound, z),),
        sampler=sampler,
        count=count,
        **changes,
    )


def test_unsampled_releases_get_the_exact_accountant():
    found = accounting.epsilon([release(z=2.0, count=3), release(z=5.0, count=1)], RECORD)
    assert found.accountant == "gdp-exact"
    assert found.epsilon == pytest.approx(gdp.epsilon_from_mu(math.sqrt(3 / 4 + 1 / 25), 1e-5))
    assert found.releases == 4


def test_sampled_releases_get_pld():
    found = accounting.epsilon([release(sampler=HIDDEN, z=1.0, count=100)], RECORD)
    assert found.accountant == "pld"
    assert found.epsilon == pytest.approx(7.0466, rel=3e-4)


def test_events_and_plans_cost_the_same():
    planned = [PlannedRelease("update", 1.5, HIDDEN, 40), PlannedRelease("accuracy", 20.0, NoSampling(), 4)]
    happened = [release(sampler=HIDDEN, z=1.5, count=40), release(z=20.0, count=4)]
    assert accounting.epsilon(planned, RECORD) == accounting.epsilon(happened, RECORD)


def test_scaling_bound_and_noise_together_changes_nothing():
    small, large = (accounting.epsilon([release(bound=c)], RECORD).epsilon for c in (0.1, 50.0))
    assert small == large


def test_replace_one_doubles_only_the_unsampled_sensitivity():
    spec = replace(RECORD, adjacency=Adjacency.REPLACE_ONE)
    plain = accounting.epsilon([release(spec, z=1.0, count=10)], spec).epsilon
    assert plain == pytest.approx(46.21, abs=5e-3)
    sampled = accounting.epsilon([release(spec, HIDDEN, z=1.0, count=100)], spec).epsilon
    assert sampled == pytest.approx(10.516, rel=3e-4)


@pytest.mark.parametrize("sampler", [Poisson(0.1, KnownTo.SERVER), Poisson(0.1, KnownTo.EVERYONE), NoSampling()])
def test_sampling_that_the_server_sees_does_not_amplify(sampler):
    assert normal_form([release(sampler=sampler)], RECORD) == (Gaussians(2.0, 1.0, 10),)


def test_a_trusted_server_hides_its_cohort():
    spec = PrivacySpec(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, view=TrustedServer())
    cohort = release(spec, Poisson(0.5, KnownTo.SERVER))
    assert normal_form([cohort], spec) == (Gaussians(2.0, 0.5, 10),)
    assert hidden_rate(cohort.sampler, cohort.spec) == 0.5


def test_shares_add_up_behind_secure_aggregation():
    spec = PrivacySpec(unit=Unit.CLIENT, view=SecureAggregation(50, 1))
    (group,) = normal_form([release(spec, z=0.3)], spec)
    assert group.noise_multiplier == pytest.approx(0.3 * 7)
    assert group.noise_multiplier == spec.seen(release(spec, z=0.3).noise_multiplier)


def test_a_shuffled_pass_is_one_unamplified_release():
    found = accounting.epsilon([release(sampler=Shuffled(), z=2.0, count=5)], RECORD)
    assert found.epsilon == pytest.approx(gdp.epsilon_from_mu(math.sqrt(5) / 2, 1e-5))


def test_shuffling_under_add_remove_is_refused():
    spec = replace(RECORD, adjacency=Adjacency.ADD_REMOVE)
    with pytest.raises(UnsoundError, match="R4"):
        accounting.epsilon([release(spec, Shuffled())], spec)


def test_adaptive_noise_is_refused():
    with pytest.raises(UnsoundError, match="R2 and R3"):
        accounting.epsilon([release(noise_origin=Origin.RELEASED)], RECORD)


def test_adaptive_bounds_and_public_noise_are_fine():
    fixed = accounting.epsilon([release()], RECORD).epsilon
    free = release(bound_origin=Origin.RELEASED, noise_origin=Origin.PUBLIC)
    assert accounting.epsilon([free], RECORD).epsilon == fixed


def test_another_spec_or_another_client_is_refused():
    other = replace(RECORD, delta=1e-6)
    with pytest.raises(UserError, match="another spec"):
        accounting.epsilon([release(other)], RECORD)
    with pytest.raises(UserError, match="one client's"):
        accounting.epsilon([release(), replace(release(), client="b")], RECORD)


def test_nothing_released_costs_nothing():
    assert accounting.epsilon([], RECORD).epsilon == 0


def test_an_epsilon_without_its_meaning_cannot_be_built():
    whole = {"epsilon": 1.0, "spec": RECORD, "samplers": (NoSampling(),), "accountant": "pld", "releases": 1}
    Guarantee(**whole)
    for missing in ("spec", "samplers"):
        with pytest.raises(TypeError):
            Guarantee(**{k: v for k, v in whole.items() if k != missing})
        with pytest.raises(UserError, match="means nothing"):
            Guarantee(**{**whole, missing: ()})
    with pytest.raises(UserError):
        Guarantee(**{**whole, "epsilon": math.nan})


def test_a_guarantee_says_what_it_means():
    found = accounting.epsilon([release(sampler=HIDDEN)], RECORD)
    body = found.to_dict()
    assert {"epsilon", "delta", "unit", "adjacency", "view", "samplers", "accountant"} <= body.keys()
    assert "record" in found.sentence()


def test_the_choice_is_the_tight_one():
    """A mutant that prices hidden sampling as none is sound but 5 times as large; the choice must not be it."""
    group = Gaussians(4.0, 0.01, 1000)
    chosen = accounting.epsilon([PlannedRelease("u", 4.0, Poisson(0.01, KnownTo.CLIENT), 1000)], RECORD).epsilon
    assert chosen == pld.epsilon([group], 1e-5, Adjacency.ZERO_OUT)
    assert gdp.epsilon_from_mu(math.sqrt(1000) / 4, 1e-5) > 5 * chosen


def test_the_view_is_part_of_the_spec():
    assert isinstance(RECORD.view, ServerSeesMessages)


@pytest.mark.parametrize("value", [0.0, 1e-7, 0.94697244, 7.0474, 9.99999, 2655.3401, 1.0])
def test_printed_values_are_rounded_up(value):
    assert value <= float(shown(value)) <= value * 1.0011
