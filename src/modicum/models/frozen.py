"""Fixed features with a linear head: only the head is trained, so the noise has few dimensions to fall on.

The features come from a backbone that was trained on a public proxy, or are the records themselves where they were
computed beforehand (`featured`). A public transform may follow: it is fitted to public records alone and frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.errors import UserError


class Whitened(nn.Module):
    """Public features' leading directions with equal spread, cut to length 1.

    Gradients of a linear head then have norms of at most 2, whatever the record, and directions in which the
    public records hardly differ cost no noise.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, mean: Tensor, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        """Centred, mapped, and brought to length 1."""
        return functional.normalize((x.flatten(1) - self.mean) @ self.matrix, dim=1)


class UnitNorm(nn.Module):
    """Features cut to length 1: what `Whitened` does where there are no public records to fit it to."""

    def forward(self, x: Tensor) -> Tensor:
        """Records brought to length 1."""
        return functional.normalize(x.flatten(1), dim=1)


class FixedFeatures(nn.Module):
    """`head(features(x))`; only the head has parameters."""

    fixed_features = True

    def __init__(self, features: nn.Module, size: int, classes: int) -> None:
        super().__init__()
        self.features = frozen(features)
        self.head = nn.Linear(size, classes)
        nn.init.zeros_(self.head.weight)  # convex: no start is better than another
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the head on the fixed features."""
        logits: Tensor = self.head(self.features(x))
        return logits


def frozen(module: nn.Module) -> nn.Module:
    """The same module with its parameters as buffers, in evaluation mode for good."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    module.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign]
    return module


def fit_whitening(public: Tensor, size: int, shrink: float = 0.05) -> Whitened:
    """The `size` leading principal directions of public records, each divided by its (shrunken) spread.

    `shrink` is the share of the mean variance that is added to every direction's own.
    """
    x = public.flatten(1).double()
    if not 1 <= size <= x.shape[1]:
        raise UserError(f"the whitened size must lie between 1 and {x.shape[1]}, got {size}")
    if len(x) < 2:
        raise UserError("whitening needs at least two public records: give the federation a proxy")
    mean = x.mean(0)
    values, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / (len(x) - 1))
    values, vectors = values.flip(0)[:size].clamp_min(0), vectors.flip(1)[:, :size]
    matrix = vectors / torch.sqrt(values + shrink * values.mean() + 1e-12)
    return Whitened(mean.float(), matrix.float())


@dataclass(frozen=True)
class Discriminant:
    """Directions, all with a variance of 1 inside the public classes, by falling variance between them."""

    mean: Tensor
    matrix: Tensor  # a direction a column
    between: Tensor  # variance of class means along each

    def cut(self, size: int) -> Whitened:
        """The map onto the first `size` directions."""
        if not 1 <= size <= len(self.between):
            raise UserError(f"the discriminant size must lie between 1 and {len(self.between)}, got {size}")
        return Whitened(self.mean.float(), self.matrix[:, :size].float())


def discriminant(public: Tensor, labels: Tensor, shrink: float = 0.5, *, scaled: bool = False) -> Discriminant:
    """All directions of public records in the order of Fisher's discriminant: first those in which public classes
    differ most, for their own spread, so that a gradient holds more signal for the same length.

    `shrink` is the share of the mean variance that is added to every direction's own, for there may be few public
    records in many dimensions. `scaled` divides each feature by its public spread first, so that those of several
    backbones count alike. Directions in which the K classes do not differ, of which there are at least D − (K−1),
    come last, the larger variance before whitening first: private classes may differ there.
    """
    x = public.flatten(1).double()
    spread = x.std(0) + 1e-3 * x.std() if scaled else torch.ones(x.shape[1], dtype=x.dtype)
    x = x / spread
    classes, at = torch.unique(labels, return_inverse=True)
    if len(x) <= len(classes) or len(classes) < 2:
        raise UserError(
            "a discriminant needs more public records than classes, of two or more: raise the proxy's share"
        )
    counts = at.bincount().double()
    means = torch.zeros(len(classes), x.shape[1], dtype=x.dtype).index_add_(0, at, x) / counts[:, None]
    rest = x - means[at]
    within = rest.T @ rest / (len(x) - len(classes))
    within += shrink * within.diagonal().mean() * torch.eye(len(within), dtype=x.dtype)
    values, vectors = torch.linalg.eigh(within)
    even = vectors / values.sqrt()
    mean = means.mean(0)
    _, sizes, directions = torch.linalg.svd((means - mean) @ even, full_matrices=False)
    rank = min(len(classes) - 1, x.shape[1])
    directions = torch.cat([directions[:rank].T, _others(directions[:rank].T, values)], 1)
    between = torch.zeros(x.shape[1], dtype=x.dtype)
    between[:rank] = sizes[:rank].square() / len(classes)
    return Discriminant(mean * spread, even @ directions / spread[:, None], between)


def _others(taken: Tensor, values: Tensor) -> Tensor:
    """The directions orthogonal to those taken, by falling variance before whitening (`values` of the axes)."""
    kept = torch.eye(len(values), dtype=values.dtype) - taken @ taken.T
    _, vectors = torch.linalg.eigh(kept @ (values[:, None] * kept))
    others: Tensor = vectors.flip(1)[:, : len(values) - taken.shape[1]]
    return others
