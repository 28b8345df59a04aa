"""Datasets that come with scikit-learn and need no files."""

from __future__ import annotations

from typing import Any

import numpy as np

from modicum.data.arrays import Array, Arrays, Dataset
from modicum.errors import MissingExtraError

# Round upper ends of the 30 features of breast-cancer (mean, standard error and worst of ten measurements each),
# from the ranges printed in the dataset's public description.
_CANCER_TOP = np.array(
    [
        *(30, 40, 200, 2500, 0.2, 0.4, 0.5, 0.25, 0.4, 0.1),
        *(3, 5, 25, 550, 0.04, 0.15, 0.4, 0.06, 0.1, 0.03),
        *(40, 50, 260, 4500, 0.25, 1.1, 1.3, 0.3, 0.7, 0.25),
    ]
)


def digits() -> Dataset:
    """1,797 digits of 8×8 pixels in [0, 1]; a fixed fifth is the test set."""
    data = _sklearn().load_digits()
    x = (data.images / 16).astype(np.float32)[:, None]  # pixels count 0–16 by construction
    train, test = fixed_split(Arrays(x, data.target), data.target)
    return Dataset("digits", train, test, classes=10)


def breast_cancer() -> Dataset:
    """569 tumours, 30 features in [−1, 1], label 1 benign; a fixed fifth is the test set."""
    data = _sklearn().load_breast_cancer()
    x = np.clip(2 * data.data / _CANCER_TOP - 1, -1, 1).astype(np.float32)
    train, test = fixed_split(Arrays(x, data.target), data.target)
    return Dataset("breast-cancer", train, test, classes=2)


def fixed_split(arrays: Arrays, strata: Array, fraction: float = 0.2) -> tuple[Arrays, Arrays]:
    """Train and test for data published without a test set: the same for everybody, in proportion by stratum."""
    held = fixed_test_rows(strata, fraction)
    return arrays.take(~held), arrays.take(held)


def fixed_test_rows(strata: Array, fraction: float = 0.2) -> Array:
    """Which records are for testing, the same whenever it is asked; each stratum in proportion."""
    from modicum.data.federate import stratified_rows

    held = np.zeros(len(strata), bool)
    held[stratified_rows(strata, fraction, np.random.default_rng(20240601))] = True
    return held


def _sklearn() -> Any:
    try:
        from sklearn import datasets
    except ImportError:
        raise MissingExtraError("scikit-learn", None, "an embedded dataset") from None
    return datasets
