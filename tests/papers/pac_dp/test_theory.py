"""The bounds and the surrogate behave as they must."""

from __future__ import annotations

import pytest
import torch

from modicum.errors import UserError
from modicum.papers.pac_dp.bounds import Configuration, Objective, bound
from modicum.papers.pac_dp.curve import Curve
from modicum.papers.pac_dp.surrogate import surrogate
from modicum.papers.pac_dp.theory import costs, fitting_error

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


def test_theorem_five_by_hand() -> None:
    """Pairs (1, 1), (2, 3), (3, 2), (4, 4): C = .8ε + .5 leaves 1.8/4 = .45. Seeds that chose (1, 3, 2, 4) and
    (1, 3, 2, 2) have variances 0, 0, 0, 2: their mean .5 over n = 4 budgets is .125, and √.575 = .758.
    """
    pairs = [[1.0, 1.0], [2.0, 3.0], [3.0, 2.0], [4.0, 4.0]]
    about = {"pairs": pairs, "by_seed": [[1, 3, 2, 4], [1, 3, 2, 2]]}
    found = fitting_error(Curve((1.0, 4.0), (1.0, 4.0), about=about), "a curve")
    assert (found.simulation, found.approximation) == pytest.approx((0.125, 0.45))
    assert found.bound == pytest.approx(0.758, abs=1e-3)
    assert found.utility_gap(2.0) == pytest.approx(1.517, abs=1e-3)
    alone = fitting_error(Curve((1.0, 4.0), (1.0, 4.0), about={"pairs": pairs}), "an old one")
    assert alone.simulation is None


def test_theorem_six_by_hand() -> None:
    """M = 50, q = ½, d = 100, R = 5, a grid of 4 × 6 over 10 rounds."""
    found = costs(clients=50, share=0.5, dimension=100, steps=5, budgets=4, bounds=6, rounds=10)
    assert (found.sent, found.client, found.offline) == (2500, 500, 24000)


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
