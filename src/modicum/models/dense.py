"""Fully connected models."""

from __future__ import annotations

import math

from torch import nn


def logistic(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def mlp(input_shape: tuple[int, ...], classes: int, *, hidden: int = 64) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
