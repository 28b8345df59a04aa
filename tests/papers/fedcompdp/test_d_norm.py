"""The projection onto simplex ∩ constrained D-norm set, against other solvers and by its properties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from modicum.papers.fedcompdp.d_norm import d_norm, d_norm_slope, project


def case(seed: int, n: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(seed)
    n = n or int(rng.integers(2, 9))
    q = rng.dirichlet(np.full(n, 2.0))
    return rng.normal(size=n) * rng.choice([0.1, 1, 5]), q, q * rng.uniform(0.05, 2, n), rng.uniform(0.05, n)


def infeasibility(p: np.ndarray, q: np.ndarray, reach: np.ndarray, gamma: float) -> float:
    away = np.abs(p - q)
    return max(abs(p.sum() - 1), (-p).max(), (away - reach).max(), (away / reach).sum() - gamma)


@pytest.mark.parametrize("seed", range(25))
def test_no_solver_finds_a_nearer_point(seed: int) -> None:
    a, q, reach, gamma = case(seed)
    n = len(a)
    p = project(a, q, reach, gamma)
    assert infeasibility(p, q, reach, gamma) < 1e-10

    def apart(x: np.ndarray) -> float:  # p − q = s − r with s, r ≥ 0
        return float(((q + x[:n] - x[n:] - a) ** 2).sum())

    found = minimize(
        apart,
        np.zeros(2 * n),
        method="SLSQP",
        bounds=[(0, c) for c in reach] + [(0, min(c, b)) for c, b in zip(reach, q, strict=True)],
        constraints=[
            {"type": "eq", "fun": lambda x: x[:n].sum() - x[n:].sum()},
            {"type": "ineq", "fun": lambda x: gamma - ((x[:n] + x[n:]) / reach).sum()},
        ],
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert ((p - a) ** 2).sum() <= found.fun + 1e-6


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_it_is_a_projection(seed: int) -> None:
    a, q, reach, gamma = case(seed)
    p = project(a, q, reach, gamma)
    np.testing.assert_allclose(project(p, q, reach, gamma), p, atol=1e-9)  # idempotent
    b = a + np.random.default_rng(seed).normal(size=len(a))
    assert np.linalg.norm(project(b, q, reach, gamma) - p) <= np.linalg.norm(b - a) + 1e-9  # non-expansive
    turn = np.random.default_rng(seed).permutation(len(a))
    np.testing.assert_allclose(project(a[turn], q[turn], reach[turn], gamma), p[turn], atol=1e-9)


def test_corners() -> None:
    a, q, reach, gamma = case(3, 6)
    assert np.array_equal(project(a, q, reach, 0.0), q)
    assert np.array_equal(project(a, q, 0 * reach, gamma), q)
    np.testing.assert_allclose(project(q, q, reach, gamma), q, atol=1e-12)
    wide = project(a, q, np.full(6, 100.0), 1e6)
    descending = np.sort(a)[::-1]
    k = max(k for k in range(1, 7) if descending[k - 1] > (descending[:k].sum() - 1) / k)
    np.testing.assert_allclose(wide, np.maximum(a - (descending[:k].sum() - 1) / k, 0), atol=1e-9)  # the simplex


@pytest.mark.parametrize("seed", range(10))
def test_two_clients_by_hand(seed: int) -> None:
    a, q, reach, gamma = case(seed, 2)
    v = a - q
    most = min(*reach, gamma / (1 / reach).sum())
    s = np.clip(np.clip((v[0] - v[1]) / 2, -most, most), -q[0], q[1])
    np.testing.assert_allclose(project(a, q, reach, gamma), q + np.array([s, -s]), atol=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_far_along_the_losses_it_is_the_worst_case(seed: int) -> None:
    """max_{p∈P} pᵀf by a linear programme: what the set was made for."""
    f, q, reach, gamma = case(seed)
    n = len(f)
    ways = np.concatenate([1 / reach, 1 / reach])[None]
    bounds = [(0, c) for c in reach] + [(0, min(c, b)) for c, b in zip(reach, q, strict=True)]
    worst = linprog(
        np.concatenate([-f, f]), A_ub=ways, b_ub=[gamma], A_eq=[[1] * n + [-1] * n], b_eq=[0], bounds=bounds
    )
    p = project(q + 1e5 * f, q, reach, gamma)
    assert p @ f == pytest.approx(q @ f - worst.fun, abs=1e-4)


def test_the_norm_of_models() -> None:
    x = torch.tensor([3.0, -5.0, 1.0, 0.5], dtype=torch.double)
    assert d_norm(x, 2) == 8.0
    assert d_norm_slope(x, 2).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert float(d_norm_slope(x, 2) @ x) == d_norm(x, 2)
