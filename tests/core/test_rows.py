"""Rows of correlated noise are C⁻¹z, whenever and in whatever order they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz
from torch import Tensor

from modicum.core.release_gate import rows_of
from modicum.core.rows import NoiseRows
from modicum.privacy.correlated import Correlation
from modicum.privacy.factors import IDENTITY, Banded, Blt, Factor, Participation, square_root
from modicum.privacy.noise import NoiseKey, SimulatedNoise

STEPS, SIZE = 9, 5
LIKE = torch.zeros(SIZE, dtype=torch.float64)
FACTORS = [IDENTITY, square_root(4), Banded((1.0, 0.0, 0.7)), Blt((0.9, 0.3), (0.3, 0.2))]


def rows(factor: Factor, seed: int = 3) -> NoiseRows:
    return rows_of(SimulatedNoise(seed), "s", Correlation.of(factor, Participation(STEPS, STEPS, 1)))


def drawn(seed: int = 3) -> np.ndarray:
    source = SimulatedNoise(seed)
    return np.stack([source.normal(NoiseKey("s", t, 0, "row:update"), SIZE) for t in range(STEPS)])


@pytest.mark.parametrize("factor", FACTORS)
def test_rows_are_the_inverse_of_the_factor_times_what_was_drawn(factor: Factor) -> None:
    made = rows(factor)
    found = np.stack([made.row("update", t, LIKE).numpy() for t in range(STEPS)])
    whole = np.tril(toeplitz(factor.column(STEPS)))
    assert whole @ found == pytest.approx(drawn(), abs=1e-12)


@pytest.mark.parametrize("factor", FACTORS)
def test_rows_do_not_depend_on_what_was_asked_before(factor: Factor) -> None:
    through = rows(factor)
    every = [through.row("update", t, LIKE).clone() for t in range(STEPS)]
    for order in ((8,), (3, 4, 4, 8), (6, 2, 6), (0, 5)):  # a restart, skipped rounds, a round that is redone
        made = rows(factor)
        for t in order:
            assert torch.equal(made.row("update", t, LIKE), every[t])


def test_blocks_and_rows_are_independent_of_each_other() -> None:
    made = rows(square_root(3))
    assert not torch.equal(made.row("update", 0, LIKE), made.row("clip-bit", 0, LIKE))


def test_new_rows_after_a_restart_would_not_fit_the_factor() -> None:
    """Negative control: what a resumed run would add if its rows were drawn anew."""
    factor, first, second = square_root(4), rows(square_root(4), 3), rows(square_root(4), 4)
    mixed = [(first if t < 5 else second).row("update", t, LIKE) for t in range(STEPS)]
    whole: Tensor = torch.from_numpy(np.tril(toeplitz(factor.column(STEPS))))
    undone = (whole @ torch.stack(mixed)).numpy()
    assert np.abs(undone[:5] - drawn(3)[:5]).max() < 1e-12
    assert np.abs(undone[5:] - drawn(4)[5:]).max() > 0.1
