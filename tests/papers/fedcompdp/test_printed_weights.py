"""CRA as printed: numbers of Eqs. (9)–(19) worked by hand."""

import math
from typing import Any

import pytest
import torch

from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released
from modicum.errors import UserError
from modicum.papers.fedcompdp.printed_weights import PrintedWeights

PUBLIC = PublicFacts(tuple(ClientFacts(n, 100, 1.0, 5) for n in ("a", "b")), 20, 2, {})
MODEL = torch.zeros(2, dtype=torch.double)


def told(*updates: list[float]) -> tuple[Released, ...]:
    return tuple(
        Released(name, 0, torch.tensor(u, dtype=torch.double), {}, NoiseFacts(0.0, 1.0))
        for name, u in zip(("a", "b"), updates, strict=True)
    )


def judge(a: float, b: float) -> Any:
    """Client a moves along the first coordinate, b along the second."""
    return lambda model: {"macro_f1": a if model[0] > model[1] else b, "accuracy": 0.0, "loss": 0.0}


def test_weights_are_a_softmax_of_this_rounds_scores() -> None:
    """q̃ = .1·q, ũ = .1·u after one round of β = .9: s = (.8/1, .1/.02) = (.8, 5), α = softmax = (.0148, .9852)."""
    rule = PrintedWeights(tiny=0.0, first=0.0, rate=0.0)
    mean, state = rule.combine(rule.init(PUBLIC), MODEL, told([1.0, 0.0], [0.0, 0.02]), judge(0.8, 0.1))
    alpha = math.exp(0.8) / (math.exp(0.8) + math.exp(5.0))
    assert alpha == pytest.approx(0.0148, abs=1e-4)
    assert mean.tolist() == pytest.approx([alpha, (1 - alpha) * 0.02])
    assert state["seen"]["a"] == pytest.approx([0.08, 0.1])
    other, _ = rule.combine(rule.init(PUBLIC), MODEL, told([1.0, 0.0], [0.0, 0.02]), judge(0.1, 0.1))
    assert not torch.equal(mean, other)  # this round's scores count at once


def test_running_means_run() -> None:
    """Second round: q̃ = .9·.08 + .1·.4 = .112, ũ = .9·.1 + .1·3 = .39."""
    rule = PrintedWeights()
    state = rule.combine(rule.init(PUBLIC), MODEL, told([1.0, 0.0], [0.0, 1.0]), judge(0.8, 0.5))[1]
    state = rule.combine(state, MODEL, told([3.0, 0.0], [0.0, 1.0]), judge(0.4, 0.5))[1]
    assert state["seen"]["a"] == pytest.approx([0.112, 0.39])


def test_cuts_push_outwards_and_are_kept() -> None:
    """Both clients send (1, 0), so w̄ = (1, 0), p = (1, 0), c = −1.

    λ₀ = .01: w = (1.01, 0), λ ← .01 + .1·(1.01 − 1) = .011. Second round from w: w̄ = (2.01, 0), a second cut with
    c = −2.01; w = w̄ + (.011 + .01)·p = (2.031, 0); λ₁ ← .011 + .1·(2.031 − 1) = .1141, λ₂ ← .01 + .1·.021 = .0121.
    """
    rule = PrintedWeights()
    both = told([1.0, 0.0], [1.0, 0.0])
    one, state = rule.combine(rule.init(PUBLIC), MODEL, both, judge(0.5, 0.5))
    assert one.tolist() == pytest.approx([1.01, 0.0])
    assert state["multipliers"] == pytest.approx([0.011])
    two, state = rule.combine(state, one, both, judge(0.5, 0.5))
    assert two.tolist() == pytest.approx([2.031, 0.0])
    assert state["multipliers"] == pytest.approx([0.1141, 0.0121])
    assert [c for _, c in state["planes"]] == pytest.approx([-1.0, -2.01])


def test_a_cut_leaves_when_its_multiplier_is_zero() -> None:
    """The model goes back behind the first cut: λ₁ = [.011 + .1·(−3 − .01·1 − 1 …)]₊ = 0 and the cut is gone."""
    rule = PrintedWeights()
    model, state = rule.combine(rule.init(PUBLIC), MODEL, told([1.0, 0.0], [1.0, 0.0]), judge(0.5, 0.5))
    _, state = rule.combine(state, model, told([-4.0, 0.0], [-4.0, 0.0]), judge(0.5, 0.5))
    assert len(state["planes"]) == 1
    assert state["planes"][0][0].tolist() == [-1.0, 0.0]


def test_a_new_cut_without_a_multiplier_does_nothing() -> None:
    rule = PrintedWeights(first=0.0)
    model, state = rule.combine(rule.init(PUBLIC), MODEL, told([1.0, 0.0], [1.0, 0.0]), judge(0.5, 0.5))
    assert (model.tolist(), state["multipliers"]) == ([1.0, 0.0], [])


def test_the_d_norms_slope_is_signs_of_the_largest() -> None:
    rule = PrintedWeights(norm="d", largest=0.5, rate=0.0)
    model, _ = rule.combine(rule.init(PUBLIC), MODEL, told([2.0, -1.0], [2.0, -1.0]), judge(0.5, 0.5))
    assert model.tolist() == pytest.approx([2.01, -1.0])


@pytest.mark.parametrize("settings", [{"memory": 1.0}, {"rate": -1.0}, {"first": math.nan}])
def test_bad_settings_get_one_line(settings: dict[str, float]) -> None:
    with pytest.raises(UserError):
        PrintedWeights(**settings)  # type: ignore[arg-type]
