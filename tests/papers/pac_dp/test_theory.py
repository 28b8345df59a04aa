"""The bounds and the surrogate behave as they must."""

from __future__ import annotations

import pytest
import torch

from modicum.errors import UserError
from modicum.papers.pac_dp.bounds import Configuration, Objective, bound
from modicum.papers.pac_dp.surrogate import surrogate

TERMS = Configuration(clients=50, rounds=25, batch=100.0, multiplier=2.0, bound=1.0, dimension=400)


@pytest.mark.parametrize("objective", list(Objective))
def test_dropped_terms_are_root_d_and_bias(objective: Objective) -> None:
    found = bound(objective, TERMS)
    assert found.noise == pytest.approx(20 * found.noise_printed)
    assert found.complete >= found.printed


def test_table_one() -> None:
    noise = 2.0 / (100 * 50**0.5)
    assert bound("non-convex", TERMS).printed == pytest.approx((50 * 25) ** -0.5 + noise)
    assert bound("convex", TERMS).printed == pytest.approx(25**-0.5 + noise)
    assert bound("strongly convex", TERMS).printed == pytest.approx(1 / 25 + noise)


def test_the_best_bound_does_not_fall_with_the_budget() -> None:
    g = torch.randn(300, 20, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 300)[:, None]
    g[:, 0] += g.norm(dim=1) ** 2 / 5  # large gradients point elsewhere, so clipping turns the mean
    bounds = [0.1 * 2**k for k in range(10)]
    best = [surrogate(g, bounds, z, 100, 10).best for z in (200.0, 20.0, 2.0, 0.2)]
    assert best == sorted(best)
    assert best[0] < best[-1]


def test_no_clipping_has_no_bias_and_noise_grows_with_the_bound() -> None:
    g = torch.randn(50, 5, generator=torch.Generator().manual_seed(1)) + 1
    found = surrogate(g, [100.0, 200.0], 1.0, 100, 10)
    assert found.bias == pytest.approx((0, 0), abs=1e-9)
    assert found.noise[1] == pytest.approx(4 * found.noise[0])


def test_bad_input_is_refused() -> None:
    with pytest.raises(UserError):
        surrogate(torch.ones(3), [1.0], 1.0, 10, 1)
    with pytest.raises(UserError):
        Configuration(clients=0, rounds=1, batch=1, multiplier=1, bound=1, dimension=1)
