"""Stacks of clients that differ in parameters, batch sizes and bounds, and the comparison of two engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Auto, Clip, Flat, PerLayer
from modicum.core.layout import Layout
from modicum.core.parts import Backend, Batch

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
SIZES = (4, 1, 0, 6)
BOUNDS = (0.1, 1.0, 2.0, 50.0)


def losses(outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(outputs, targets["y"], reduction="none")


def stack(
    model: nn.Module, shape: Sequence[int], sizes: Sequence[int] = SIZES, classes: int = 10
) -> tuple[Tensor, list[Batch]]:
    """One row of parameters and one batch for each size, all different."""
    layout = LoopBackend(model).layout
    first = layout.read(model)
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(len(sizes), len(first), generator=generator, dtype=first.dtype)
    batches = [
        Batch(
            torch.randn(n, *shape, generator=generator, dtype=first.dtype),
            {"y": torch.randint(0, classes, (n,), generator=generator)},
        )
        for n in sizes
    ]
    return first + 0.05 * first.std() * spread, batches


def rules(layout: Layout) -> tuple[Clip, ...]:
    """One of each kind; layer by layer with other bounds for each parameter."""
    return Flat(), Auto(), PerLayer({name: 1.0 + i for i, name in enumerate(layout.names)})


def clips(bounds: Sequence[float], rule: Clip | None = None) -> list[Clip]:
    """A client each, by one rule."""
    return [(rule or Flat()).scaled_to(bound) for bound in bounds]


def error(found: Tensor, truth: Tensor) -> float:
    """The largest error of a client's row, relative to that row."""
    size = torch.linalg.vector_norm(truth, dim=1)
    off = torch.linalg.vector_norm(found - truth, dim=1)
    return float((off / size.clamp(min=1e-30)).where(size > 0, off).max())


def assert_same(found: Backend, truth: Backend, theta: Tensor, batches: Sequence[Batch]) -> None:
    """Gradients, clipped sums and norms agree; twice, since an engine checks itself on its first batches."""
    limit = TOLERANCE[theta.dtype]
    C = BOUNDS[: len(batches)]
    flat, auto, by_layer = rules(truth.layout)
    for some in ((flat, by_layer), (auto,)):
        assert error(found.gradients(theta, batches, losses), truth.gradients(theta, batches, losses)) <= limit
        for rule in some:
            sums, norms = found.clipped_sums(theta, batches, losses, clips(C, rule))
            expected, expected_norms = truth.clipped_sums(theta, batches, losses, clips(C, rule))
            assert error(sums, expected) <= limit
            for mine, theirs in zip(norms, expected_norms, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=limit, atol=1e-12)
