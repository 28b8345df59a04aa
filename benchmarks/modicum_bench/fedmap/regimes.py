"""Two federations made so that a learned policy should pay, and one where it should not.

- `aligned`: one record in ten has a large gradient that tells the classes apart; the others are small and their
  labels are chance. Small bounds (and AUTO-S) let the crowd drown them.
- `decaying`: classes lie far apart, so that a few rounds find most of what there is and the signal is gone after;
  its budget is small enough for noise to show all the same.
- `even`: every record alike, and hard enough for the signal to last.
"""

from __future__ import annotations

import numpy as np

from modicum.data.arrays import Arrays, Dataset

REGIMES = {"aligned": 2.0, "decaying": 0.1, "even": 1.0}  # with their budgets
FEATURES, TRAIN, TEST = 20, 4000, 1000
DRAW = 1  # on draw 0 the constructions were tried


def regime(name: str, seed: int = DRAW) -> Dataset:
    """Two classes in twenty dimensions."""
    rng = np.random.default_rng([seed, list(REGIMES).index(name)])
    train, test = (_records(name, rng, n, training) for n, training in ((TRAIN, True), (TEST, False)))
    return Dataset(name, train, test, 2)


def _records(name: str, rng: np.random.Generator, n: int, training: bool) -> Arrays:
    y = rng.integers(0, 2, n)
    sign = 2.0 * y - 1
    x = rng.normal(size=(n, FEATURES))
    gap = {"aligned": 1.5, "decaying": 3.0, "even": 0.3}[name]
    x[:, 0] += gap * sign
    if name == "aligned" and training:
        crowd = rng.random(n) < 0.9
        x[crowd] = rng.normal(size=(int(crowd.sum()), FEATURES)) * 0.3
        x[~crowd] *= 3
    return Arrays(x.astype(np.float32), y)
