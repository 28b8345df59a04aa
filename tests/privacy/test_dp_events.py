import math
from dataclasses import replace

import dp_accounting
import pytest
from dp_accounting import NeighboringRelation
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.errors import UserError
from modicum.privacy import accounting
from modicum.privacy.accounting import hidden_rate
from modicum.privacy.accounting.dp_events import (
    from_dp_event,
    library_epsilon,
    to_dp_event,
)
from modicum.privacy.events import Block, NoSampling, Origin, Poisson, Release, Shuffled
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, TrustedServer, Unit
from modicum.privacy.views import KnownTo

RECORD = PrivacySpec(unit=Unit.RECORD)
UNSAMPLED = NoSampling()
REPLACE = replace(RECORD, adjacency=Adjacency.REPLACE_ONE)

specs = st.sampled_from(
    [
        RECORD,
        REPLACE,
        PrivacySpec(unit=Unit.CLIENT, view=SecureAggregation(50, 3)),
        PrivacySpec(unit=Unit.CLIENT, adjacency=Adjacency.ADD_REMOVE, view=TrustedServer()),
    ]
)
positive = st.floats(1e-3, 1e3)
samplers = st.one_of(
    st.just(NoSampling()),
    st.builds(Poisson, st.floats(1e-4, 1.0), st.sampled_from(KnownTo)),
)
releases = st.builds(
    Release,
    client=st.just("hospital-1"),
    round=st.integers(0, 100),
    step=st.integers(0, 9),
    count=st.integers(1, 1000),
    spec=specs,
    blocks=st.lists(positive, min_size=1, max_size=3).map(
        lambda zs: tuple(Block(f"b{i}", 1.0 + i, z) for i, z in enumerate(zs))
    ),
    sampler=samplers,
    bound_origin=st.sampled_from(Origin),
    noise_origin=st.sampled_from(Origin),
)


@given(releases)
@settings(max_examples=200, deadline=None)
def test_round_trip(release):
    assert from_dp_event(to_dp_event(release), release) == release


@given(releases, positive, st.integers(1, 50), st.floats(1e-3, 0.999))
@settings(max_examples=100, deadline=None)
def test_an_event_overrides_its_template(release, z, count, rate):
    event = dp_accounting.GaussianDpEvent(z)
    hidden = hidden_rate(release.sampler, release.spec) < 1
    if hidden:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    found = from_dp_event(dp_accounting.SelfComposedDpEvent(event, count), release)
    assert found.spec.seen(found.noise_multiplier) == pytest.approx(z)
    assert found.count == count
    assert hidden_rate(found.sampler, found.spec) == (rate if hidden else 1)
    assert (found.client, found.round, found.spec) == (release.client, release.round, release.spec)


def release(z=2.0, sampler=UNSAMPLED, count=3, spec=RECORD):
    return Release(client="a", round=1, spec=spec, blocks=(Block("u", 1.0, z),), sampler=sampler, count=count)


def test_what_an_event_says():
    assert to_dp_event(release(count=1)) == dp_accounting.GaussianDpEvent(2.0)
    sampled = to_dp_event(release(1.0, Poisson(0.1, KnownTo.CLIENT), 20))
    inner = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    assert sampled == dp_accounting.SelfComposedDpEvent(inner, 20)
    planned = PlannedRelease("u", 1.0, Poisson(0.1, KnownTo.CLIENT), 20)
    assert to_dp_event(planned, RECORD) == sampled
    with pytest.raises(UserError, match="PrivacySpec"):
        to_dp_event(planned)


def test_sampling_that_is_seen_is_not_in_the_event():
    assert to_dp_event(release(2.0, Poisson(0.1, KnownTo.SERVER), 1)) == dp_accounting.GaussianDpEvent(2.0)
    assert to_dp_event(release(2.0, Shuffled(), 1)) == dp_accounting.GaussianDpEvent(2.0)


def test_what_is_no_gaussian_is_refused():
    with pytest.raises(UserError, match="Gaussian"):
        from_dp_event(dp_accounting.LaplaceDpEvent(1.0), release())
    hidden = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(1.0))
    with pytest.raises(UserError, match="no hidden sampler"):
        from_dp_event(hidden, release())


def test_the_trap_is_there():
    """dp-accounting's RDP accountant ignores that a replacement moves a plain Gaussian's sum twice as far."""
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), 10)
    naive = dp_accounting.rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    assert naive.compose(event).get_epsilon(1e-5) == pytest.approx(19.05, abs=0.01)
    added = accounting.epsilon([release(1.0, count=10)], RECORD).epsilon
    assert added == pytest.approx(17.86, abs=0.01)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_trap_is_closed(accountant):
    ten = [release(1.0, count=10, spec=REPLACE)]
    true = accounting.epsilon(ten, REPLACE).epsilon
    assert true == pytest.approx(46.21, abs=0.01)
    opinion = library_epsilon(ten, REPLACE, accountant=accountant)
    assert opinion >= true * 0.9999
    assert opinion < true * 1.15


@pytest.mark.parametrize("spec", [RECORD, REPLACE], ids=["zero-out", "replace-one"])
def test_second_opinions_on_a_mixture(spec):
    mixture = [
        release(1.5, Poisson(0.05, KnownTo.CLIENT), 60, spec),
        release(12.0, count=5, spec=spec),
        release(3.0, Poisson(0.2, KnownTo.CLIENT), 10, spec),
    ]
    ours = accounting.epsilon(mixture, spec).epsilon
    assert library_epsilon(mixture, spec) == pytest.approx(ours, rel=2e-3)
    assert library_epsilon(mixture, spec, accountant="rdp") >= ours


def test_no_opinion_on_nothing_or_by_nobody():
    assert library_epsilon([], RECORD) == 0
    with pytest.raises(UserError, match="pld or rdp"):
        library_epsilon([release()], RECORD, accountant="guess")


def test_shares_are_in_the_event():
    spec = PrivacySpec(unit=Unit.CLIENT, view=SecureAggregation(50, 1))
    assert to_dp_event(release(1.0, count=1, spec=spec)).noise_multiplier == pytest.approx(math.sqrt(49))
