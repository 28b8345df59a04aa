"""The order of minibatches."""

from __future__ import annotations

import numpy as np

from modicum.training.local_steps import Shuffle


def test_a_seeds_stream_does_not_depend_on_what_was_drawn_before() -> None:
    shuffle = Shuffle()
    for seed in (0, 1, 2**63 + 7, 2**100 + 3, 1):
        fresh, found = np.random.Generator(np.random.Philox(key=seed)), shuffle.of(seed)
        assert np.array_equal(found.permutation(200), fresh.permutation(200))
        assert np.array_equal(found.integers(0, 9, 3, dtype=np.int32), fresh.integers(0, 9, 3, dtype=np.int32))
