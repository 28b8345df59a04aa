"""A linear head fitted to public records: the first model of a run whose features are fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

DECAYS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
FOLDS = 5
STEPS = 50

Transform = Callable[[Tensor, Tensor], nn.Module]


def logistic_head(x: Tensor, y: Tensor, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights and biases on these features as they are, by the decay with the least loss in cross-validation.

    With fewer records than folds nothing can be compared: the strongest decay is taken.
    """

    def as_they_are(x: Tensor, y: Tensor) -> nn.Module:  # noqa: ARG001
        return nn.Identity()

    best = int(cross_validate(x, y, classes, as_they_are, seed)[0].argmin()) if len(y) >= FOLDS else 0
    return decay_path(x.double(), y, classes)[best]


def cross_validate(x: Tensor, y: Tensor, classes: int, fit: Transform, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean loss and accuracy for each decay, each record judged once by a model that has not seen it.

    Features that use the labels are fitted anew in each fold, since records that they were fitted to look better
    separated than others.
    """
    losses, right = torch.zeros(2, len(DECAYS), dtype=torch.double)
    for held in _folds(y, seed):
        kept = torch.ones(len(y), dtype=torch.bool)
        kept[held] = False
        features = fit(x[kept], y[kept])
        inside, outside = features(x[kept]).double(), features(x[held]).double()
        for i, (weight, bias) in enumerate(decay_path(inside, y[kept], classes)):
            outputs = outside @ weight.T + bias
            losses[i] += cross_entropy(outputs, y[held], reduction="sum")
            right[i] += (outputs.argmax(1) == y[held]).sum()
    return losses / len(y), right / len(y)


def _folds(y: Tensor, seed: int) -> list[Tensor]:
    """Each class is spread evenly over the folds."""
    order = np.random.default_rng([seed, 0xF01D]).permutation(len(y))
    ranked = order[np.argsort(y.numpy()[order], kind="stable")]
    return [torch.from_numpy(np.sort(ranked[i::FOLDS])) for i in range(FOLDS)]


def decay_path(
    x: Tensor, y: Tensor, classes: int, decays: Sequence[float] = DECAYS
) -> list[tuple[Tensor, Tensor]]:
    """Logistic heads for all decays, each started at the one before it."""
    weight = torch.zeros(classes, x.shape[1], dtype=torch.double, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.double, device=x.device, requires_grad=True)
    found = []
    for decay in decays:
        optimiser = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

        def loss(optimiser: torch.optim.LBFGS = optimiser, decay: float = decay) -> Tensor:
            optimiser.zero_grad()
            value = cross_entropy(x @ weight.T + bias, y) + decay / 2 * weight.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimiser.step(loss)  # type: ignore[no-untyped-call]
        found.append((weight.detach().clone(), bias.detach().clone()))
    return found
