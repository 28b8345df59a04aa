"""CRA: weights from earlier rounds and public records, and a step that stays inside the trust region."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from modicum.aggregation import Mean
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released
from modicum.core.parts import State
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.methods import Composed
from modicum.papers.fedcompdp.constraint_aware import ConstraintAware, within
from modicum.policies import Fixed
from modicum.privacy.spec import SecureAggregation
from tests.rows import federation, simulate

NAMES = ("a", "b", "c", "d")
PUBLIC = PublicFacts(tuple(ClientFacts(n, 100, 1.0, 5) for n in NAMES), 20, 4, {})
MODEL = torch.zeros(4, dtype=torch.double)


def releases(*updates: list[float], variance: float = 0.0) -> tuple[Released, ...]:
    return tuple(
        Released(name, 0, torch.tensor(u, dtype=torch.double), {}, NoiseFacts(variance, 1.0))
        for name, u in zip(NAMES, updates, strict=True)
    )


ROUND = releases([1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0])


def judge(good: dict[int, float]) -> Any:
    """Scores the candidate by which coordinate it moved."""

    def of(model: torch.Tensor) -> dict[str, float]:
        score = good.get(int(model.argmax()), 0.5)
        return {"accuracy": score, "macro_f1": score, "loss": 1 - score}

    return of


def after(rule: ConstraintAware, good: dict[int, float], rounds: int = 3) -> State:
    state = rule.init(PUBLIC)
    for _ in range(rounds):
        state = rule.combine(state, MODEL, ROUND, judge(good))[1]
    return state


def test_weights_lean_to_reliable_or_to_worst_within_the_set() -> None:
    for towards, more in (("reliable", "a"), ("worst", "b")):
        rule = ConstraintAware(towards=towards)  # type: ignore[arg-type]
        weights = rule.weights_of(after(rule, {0: 0.9, 1: 0.1}), ROUND)
        assert sum(weights.values()) == pytest.approx(1)
        assert max(weights, key=weights.__getitem__) == more
        assert all(0.125 - 1e-9 <= w <= 0.375 + 1e-9 for w in weights.values())  # ρ = ½ about ¼
        assert sum(abs(w - 0.25) / 0.125 for w in weights.values()) <= 2 + 1e-9  # Γ = N/2


def test_this_rounds_scores_do_not_enter_its_own_weights() -> None:
    rule = ConstraintAware(radius=math.inf)
    state = after(rule, {0: 0.9})
    one, other = (rule.combine(state, MODEL, ROUND, judge(g))[0] for g in ({0: 1.0}, {3: 1.0}))
    assert torch.equal(one, other)


def test_an_idle_client_does_not_win() -> None:
    """As printed, q = .1 with an update of length .02 beats q = .8 with 1 by .97 to .015 (Eqs. 13, 14)."""
    printed = torch.softmax(torch.tensor([0.1 / 0.02, 0.8 / 1.0]), 0)
    assert printed[0] > 0.97
    rule = ConstraintAware()
    state = rule.init(PUBLIC)
    idle = releases([0.02, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0])
    for _ in range(3):
        state = rule.combine(state, MODEL, idle, judge({0: 0.1, 1: 0.8, 2: 0.8, 3: 0.8}))[1]
    weights = rule.weights_of(state, ROUND)
    assert weights["a"] == min(weights.values())


def test_noise_is_taken_out_of_lengths() -> None:
    """Two clients learn alike, one under much more noise: their lengths come out alike."""
    rule, generator = ConstraintAware(), torch.Generator().manual_seed(0)
    public = PublicFacts(PUBLIC.clients[:2], 20, 4000, {})
    signal = torch.full((4000,), 0.05, dtype=torch.double)
    state = rule.init(public)
    for _ in range(5):
        opened = tuple(
            Released(
                n,
                0,
                signal + s * torch.randn(4000, generator=generator, dtype=torch.double),
                {},
                NoiseFacts(s * s, 1.0),
            )
            for n, s in (("a", 0.01), ("b", 0.05))
        )
        state = rule.combine(state, torch.zeros(4000, dtype=torch.double), tuple(opened), judge({}))[1]
    one, other = (state["seen"][n][2] for n in ("a", "b"))
    assert one == pytest.approx(other, rel=0.1)


@pytest.mark.parametrize("norm", ["l2", "d"])
def test_a_step_far_beyond_the_usual_is_cut(norm: str) -> None:
    rule = ConstraintAware(norm=norm, largest=0.25)  # type: ignore[arg-type]
    state = after(rule, {})
    usual = rule.combine(state, MODEL, ROUND, judge({}))[0]
    torch.testing.assert_close(usual, torch.full((4,), 0.25, dtype=torch.double))  # within 1.5 times itself
    huge = tuple(replace(r, update=100 * r.update) for r in ROUND)
    moved = rule.combine(state, MODEL, huge, judge({}))[0]
    if norm == "l2":
        assert moved.norm().item() == pytest.approx(1.5 * usual.norm().item())
        torch.testing.assert_close(moved / moved.norm(), usual / usual.norm())
    else:
        assert moved.norm() < 100 * usual.norm()  # one plane takes back the Γ′ largest coordinates alone
        assert moved.abs().min() == pytest.approx(1.5 * usual.norm().item())
    far = ConstraintAware(radius=math.inf)
    torch.testing.assert_close(far.combine(state, MODEL, huge)[0], 100 * usual)


def test_one_half_space_in_closed_form() -> None:
    rng = torch.Generator().manual_seed(1)
    p, point = (torch.randn(5, generator=rng, dtype=torch.double) for _ in range(2))
    for c in (-3.0, 0.5, 4.0):
        inside, (lam,) = within(point, [(p, c)])
        expected = max(float(p @ point) + c, 0.0) / float(p @ p)
        assert lam == pytest.approx(expected)
        torch.testing.assert_close(inside, point - expected * p)


@pytest.mark.parametrize("seed", range(5))
def test_several_cuts_against_a_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    planes, point = rng.normal(size=(3, 6)), 3 * rng.normal(size=6)
    offsets = rng.normal(size=3)
    inside, _ = within(
        torch.from_numpy(point), [(torch.from_numpy(p), c) for p, c in zip(planes, offsets, strict=True)]
    )
    found = minimize(
        lambda x: ((x - point) ** 2).sum(),
        np.zeros(6),
        constraints=[
            {"type": "ineq", "fun": lambda x, p=p, c=c: -(p @ x) - c} for p, c in zip(planes, offsets, strict=True)
        ],
    )
    np.testing.assert_allclose(inside.numpy(), found.x, atol=1e-3)


def test_with_the_printed_sign_the_multiplier_explodes() -> None:
    """Eq. (18) adds Σλp: the multiplier grows by 1 + η‖p‖² an iteration. The negative control of `within`."""
    p, point, c, lam = torch.ones(4, dtype=torch.double), torch.ones(4, dtype=torch.double), -3.0, 0.01
    for _ in range(60):
        lam = max(lam + 0.25 * float(p @ (point + lam * p) + c), 0.0)
    assert lam > 1e10
    assert within(point, [(p, c)])[1][0] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "settings",
    [
        {"radius": 0.0},
        {"radius": -1.0},
        {"towards": "best"},
        {"norm": "l7"},
        {"memory": 1.0},
        {"cuts": 0},
        {"gamma": -1.0},
    ],
)
def test_bad_settings_get_one_line(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        ConstraintAware(**settings)
    assert "\n" not in str(error.value)


def test_it_needs_public_labels_and_single_messages(tmp_path: Path) -> None:
    fed = federation()
    bare = replace(
        fed,
        data=replace(
            fed.data, proxy=fed.data.proxy.take(slice(0)), proxy_validation=fed.data.proxy.take(slice(0))
        ),
    )
    with pytest.raises(UserError, match="public data with the task's own labels"):
        simulate(Composed(aggregation=ConstraintAware()), tmp_path, federation=bare)
    hidden = ClientLevel(view=SecureAggregation(4))
    with pytest.raises(UserError, match="needs each client's update"):
        simulate(Composed(Fixed(), hidden, ConstraintAware()), tmp_path)
    assert not list(tmp_path.iterdir())
    assert Mean().needs_individuals is False
