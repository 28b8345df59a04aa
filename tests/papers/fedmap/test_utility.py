"""J and U against Monte Carlo, and their gradients against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from modicum.core.parts import Signal, SignalName
from modicum.errors import UserError
from modicum.mechanisms.common import query
from modicum.papers.fedmap.utility import (
    Round,
    Trace,
    clipped,
    error,
    joint_sensitivity,
    signals,
    utility,
    variance,
)

N, D, B, C, Z = 400, 50, 40, 1.3, 2.0


def gradients(seed: int = 0) -> Tensor:
    """Norms that vary by a factor of ten, around a common direction."""
    rng = np.random.default_rng(seed)
    g = rng.normal(size=(N, D)) * rng.lognormal(0, 0.6, (N, 1)) * 0.3
    g[:, 0] += 0.4
    return torch.from_numpy(g)


def whole(g: Tensor) -> Trace:
    return Trace.of(g, sides=D)


ROUND = Round(B, B / N, D, 1.0)


def one(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.double)


def simulated(g: Tensor, draws: int, seed: int = 1) -> tuple[float, float, float]:
    """(J, its standard error, U's denominator) by drawing Poisson batches and noise."""
    rng = np.random.default_rng(seed)
    rows = (g * (C / g.norm(dim=1).clamp_min(C))[:, None]).numpy()
    mean = g.mean(0).numpy()
    found, squares = [], []
    for _ in range(draws):
        batch = rows[rng.random(N) < B / N].sum(0)
        released = (batch + Z * C * rng.normal(size=D)) / B
        found.append(((released - mean) ** 2).sum())
        squares.append((released**2).sum())
    return float(np.mean(found)), float(np.std(found) / math.sqrt(draws)), float(np.mean(squares))


def test_against_monte_carlo() -> None:
    """False alarm: below 1e-6 (five standard errors), beside the bias that a finite trace has taken out."""
    g = gradients()
    true, spread, square = simulated(g, 4000)
    # With all N gradients in the trace there is no finite-sample bias to take out: undo it for this comparison.
    along, beside, s = clipped(whole(g), one(C))
    factor = torch.clamp(C / g.norm(dim=1), max=1.0)
    mean = g.mean(0)
    exact = float(((g * factor[:, None]).mean(0) - mean).square().sum())
    kept = float((along - mean.norm()) ** 2 + beside)
    j = float(error(whole(g), one(C), one(Z), ROUND)) - kept + exact
    assert j == pytest.approx(true, abs=5 * spread)
    assert abs(kept - exact) < 3 * float(s) / N  # what the correction is worth
    v = float(variance(whole(g), one(C), one(Z), ROUND))
    c2 = float(((g * factor[:, None]).mean(0)).square().sum())
    assert c2 + v == pytest.approx(square, rel=0.02)
    u = float(utility(whole(g), one(C), one(Z)[None], ROUND)[0])
    assert u == pytest.approx(float(along) ** 2 / square, rel=0.03)


@pytest.mark.parametrize("what", ["bound", "multiplier"])
@pytest.mark.parametrize("at", [(0.3, 1.0), (1.3, 2.0), (3.0, 0.5)])
def test_gradients_against_finite_differences(what: str, at: tuple[float, float]) -> None:
    trace = whole(gradients())

    def both(c: Tensor, z: Tensor) -> Tensor:
        return error(trace, c, z, ROUND) + 3 * utility(trace, c, z[None], ROUND)[0]

    c, z = (one(v).requires_grad_(True) for v in at)
    both(c, z).backward()
    leaf, step = (c, one(1e-5)) if what == "bound" else (z, one(1e-5))
    with torch.no_grad():
        up = both(c + step, z) if what == "bound" else both(c, z + step)
        down = both(c - step, z) if what == "bound" else both(c, z - step)
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(((up - down) / (2 * step)).item(), rel=1e-4)
    assert leaf.grad.item() != 0


def test_the_derivative_of_the_square_is_the_released_pair() -> None:
    """s′(C) = 2C·P(n > C)."""
    trace = whole(gradients())
    c = one(C).requires_grad_(True)
    clipped(trace, c)[2].backward()
    share, _ = signals(trace, one(C))
    assert c.grad is not None
    assert c.grad.item() == pytest.approx(2 * C * (1 - share.item()), rel=1e-9)


def test_without_a_link_between_norm_and_direction_small_bounds_are_best() -> None:
    """U peaks at C → 0, which is normalising, within a fraction of a percent of every small bound."""
    rng = np.random.default_rng(2)
    direction = rng.normal(size=(4000, D)) + 0.5
    g = torch.from_numpy(
        direction / np.linalg.norm(direction, axis=1, keepdims=True) * rng.lognormal(0, 1, (4000, 1))
    )
    values = [
        float(utility(Trace.of(g, sides=D), one(c), one(8.0)[None], ROUND)[0]) for c in (1e-3, 0.05, 0.2, 1, 20)
    ]
    assert values[0] == pytest.approx(values[1], rel=0.01)
    assert values[0] > values[-2] > values[-1]


def test_where_large_norms_align_a_larger_bound_wins() -> None:
    """A few large gradients that agree, among many small ones that do not."""
    rng = np.random.default_rng(3)
    g = rng.normal(size=(2000, D)) * 0.02
    g[:200] = 0.0
    g[:200, 0] = 2.0
    values = {
        c: float(utility(Trace.of(torch.from_numpy(g), sides=D), one(c), one(0.5)[None], ROUND)[0])
        for c in (0.02, 2.0)
    }
    assert values[2.0] > 1.5 * values[0.02]


def test_a_projection_keeps_lengths() -> None:
    rng = np.random.default_rng(5)
    g = torch.from_numpy(rng.normal(size=(300, 5000)) * 0.1 + 0.02)
    rough, exact = Trace.of(g), Trace.of(g, sides=5000)
    for c in (1.0, 5.0):
        a, b = (clipped(t, one(c)) for t in (rough, exact))
        assert a[0].item() == pytest.approx(b[0].item(), rel=1e-6)
        assert abs(a[1].item() - b[1].item()) < 0.1 * exact.mean.item() ** 2


def test_the_joint_sensitivity_is_that_of_the_mechanism() -> None:
    blocks = query("gradient", 2.0, 3.0, (Signal(SignalName.CLIP_BIT), Signal(SignalName.SQUARE_NORM)))
    assert blocks[0].noise_multiplier / 3.0 == pytest.approx(joint_sensitivity(10.0, 10.0))
    assert joint_sensitivity(10.0, 10.0) == pytest.approx(1.0102, abs=1e-4)  # 1.0% more noise


def test_one_gradient_is_too_few() -> None:
    with pytest.raises(UserError, match="two public records"):
        Trace.of(torch.zeros(1, 3))
