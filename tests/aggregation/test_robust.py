"""What robust aggregations survive, and that a mean does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.aggregation import Mean, Median, Momentum, NormBounded, TrimmedMean
from modicum.core.facts import PublicFacts
from modicum.core.messages import NoiseFacts, Released
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.methods import METHODS, method
from tests.rows import CLIENTS, ROUNDS, simulate

PUBLIC = PublicFacts((), 1, 3, {})
D = 4


def step(rule: Any, updates: list[np.ndarray[Any, Any]]) -> torch.Tensor:
    opened = tuple(
        Released(f"c{i:02d}", 0, torch.from_numpy(u), {}, NoiseFacts(1.0, 1.0)) for i, u in enumerate(updates)
    )
    moved: torch.Tensor = rule.combine(rule.init(PUBLIC), torch.zeros(D, dtype=torch.float64), opened)[0]
    return moved


def drawn(data: st.DataObject, n: int, size: float) -> list[np.ndarray[Any, Any]]:
    values = st.floats(-size, size, allow_nan=False)
    return [np.array(data.draw(st.lists(values, min_size=D, max_size=D))) for _ in range(n)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), n=st.integers(1, 12))
def test_median_and_trimmed_mean_stay_between_honest_values(data: st.DataObject, n: int) -> None:
    """In every coordinate, with as many hostile clients as documented, whatever they send."""
    trimmed = TrimmedMean(share=data.draw(st.sampled_from([0.1, 0.25, 0.4])))
    survives = {Median(): (n - 1) // 2, trimmed: min(int(np.ceil(trimmed.share * n)), (n - 1) // 2)}
    for rule, hostile in survives.items():
        honest = drawn(data, n - hostile, 1.0)
        moved = step(rule, honest + drawn(data, hostile, 1e30)).numpy()
        assert (moved >= np.min(honest, 0) - 1e-12).all()
        assert (moved <= np.max(honest, 0) + 1e-12).all()


def test_one_more_than_that_is_too_many() -> None:
    """What is documented is exact: one more hostile client moves them anywhere."""
    honest = [np.zeros(D)] * 2
    for rule in (Median(), TrimmedMean(share=0.4)):
        assert step(rule, [*honest, np.full(D, 1e9)]).max() == 0
        assert step(rule, honest + [np.full(D, 1e9)] * 3).max() > 1e8
    assert step(TrimmedMean(share=0.25), [np.zeros(D)] * 3 + [np.full(D, 1e9)]).max() == 0
    assert step(TrimmedMean(share=0.25), [np.zeros(D)] * 2 + [np.full(D, 1e9)] * 2).max() > 1e8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), n=st.integers(2, 12))
def test_a_norm_bounded_mean_is_moved_by_no_more_than_the_median_norm(data: st.DataObject, n: int) -> None:
    """k hostile of n add at most k·M/n, with M at most the largest honest norm while they are fewer than half."""
    hostile = data.draw(st.integers(0, (n - 1) // 2))
    honest = drawn(data, n - hostile, 1.0)
    most = max(np.linalg.norm(u) for u in honest)
    moved = step(NormBounded(), honest + drawn(data, hostile, 1e30))
    assert float(moved.norm()) <= most * (1 + 1e-6)


def test_a_mean_is_captured_by_one() -> None:
    """Negative control."""
    assert step(Mean(), [np.zeros(D)] * 9 + [np.full(D, 1e9)]).max() > 1e7


def test_equal_noise_leaves_them_unbiased_and_unequal_noise_too_but_skew_does_not() -> None:
    """What docs/hostile.md says of bias: symmetric noise of any mix of sizes leaves none; a skewed crowd does."""
    rng, rounds = np.random.default_rng(5), 4000
    rules = {"median": Median(), "trimmed": TrimmedMean()}
    sizes = np.array([0.1, 0.1, 1.0, 5.0, 5.0])[:, None]
    means = dict.fromkeys(rules, 0.0)
    for _ in range(rounds):
        updates = list(0.3 + sizes * rng.standard_normal((5, D)))
        for name, rule in rules.items():
            means[name] += float(step(rule, updates).mean()) / rounds
    assert all(abs(mean - 0.3) < 0.06 for mean in means.values())
    skewed = [np.full(D, v) for v in (0.0, 0.0, 0.0, 1.0, 1.0)]  # two clients that differ from three
    assert float(step(Median(), skewed).mean()) == 0.0
    assert float(step(Mean(), skewed).mean()) == pytest.approx(0.4)


NAMES = ("trimmed-mean", "median", "norm-bounded")
SUMS = {"view": "secure-aggregation"}
SHOWING: dict[str, dict[str, Any]] = {  # every method where its messages are seen
    **{name: {} for name in METHODS},
    **{n: {"view": "server-sees-messages"} for n in ("acdp-pfsd", "dp-pfsd", "dp-fedsam", "dp-fedavg", "fedprox")},
    "class-means": {"steps": 1},
}


OWN = {"fedcompdp", "look"}
"""Methods whose way of joining messages is what they are: another would be another method."""
PACED = {"dp-acdn", "fedacg"}
"""Methods that smooth or look ahead by themselves, in place of the server's momentum."""


def test_methods_with_a_way_of_their_own_say_so() -> None:
    for name in OWN:
        with pytest.raises(UserError, match="has no setting 'aggregation'"):
            method(name, aggregation="median")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OWN])
@pytest.mark.parametrize("aggregation", NAMES)
def test_every_other_method_can_use_them(name: str, aggregation: str) -> None:
    made = method(name, aggregation=aggregation, **SHOWING[name]).build(Setting(CLIENTS, CLIENTS, ROUNDS))
    rule = getattr(made.aggregation, "after", made.aggregation)  # of class means: what joins the steps
    base = getattr(rule, "base", rule)
    if name == "auto":  # its momentum is decided
        assert isinstance(base, Momentum)
        assert base.base in (TrimmedMean(), Median(), NormBounded())
        return
    assert base in (TrimmedMean(), Median(), NormBounded())
    if name in PACED:
        return
    momentum = method(name, aggregation=aggregation, server_momentum=0.5, **SHOWING[name])
    whole = momentum.build(Setting(CLIENTS, CLIENTS, ROUNDS)).aggregation
    rule = getattr(whole, "after", whole)
    assert isinstance(rule, Momentum)
    assert rule.base == base


def test_class_sums_alone_have_no_step_that_it_could_join() -> None:
    with pytest.raises(UserError, match="leave aggregation out"):
        method("class-means", aggregation="median").build(Setting(CLIENTS, CLIENTS, ROUNDS))


@pytest.mark.parametrize("aggregation", NAMES)
def test_they_are_refused_with_a_sum(aggregation: str, tmp_path: Any) -> None:
    with pytest.raises(UserError, match="needs each client's update"):
        simulate(method("dp-fedavg", aggregation=aggregation, batch=4, **SUMS), tmp_path)


def test_shares_are_checked() -> None:
    with pytest.raises(UserError, match="trimmed at either end"):
        TrimmedMean(share=0.5)
