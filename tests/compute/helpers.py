"""What the clipping tests share: small models of every layer type, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute import Clip, ClippedSum, Clipper, reference_clipped_sum

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def relative_error(found: Tensor, truth: Tensor, scale: float) -> float:
    return float(torch.linalg.vector_norm(found - truth)) / max(scale, 1e-300)


def assert_same(found: ClippedSum, truth: ClippedSum, dtype: torch.dtype) -> None:
    """Every parameter's sum within tolerance of the whole sum's norm, every norm within tolerance of itself."""
    assert list(found.total) == list(truth.total)
    whole = float(torch.stack([t.square().sum() for t in truth.total.values()]).sum().sqrt())
    for name, expected in truth.total.items():
        assert found.total[name].shape == expected.shape
        assert found.total[name].dtype == expected.dtype
        error = relative_error(found.total[name], expected, whole)
        assert error <= TOLERANCE[dtype], f"{name}: {error}"
    torch.testing.assert_close(found.norms, truth.norms, rtol=TOLERANCE[dtype], atol=1e-12)


def check(
    model: nn.Module,
    x: Any,
    y: Any,
    clip: Clip,
    *,
    loss: Callable[[Any, Any], Tensor] = cross_entropy,
    engine: Callable[..., ClippedSum] | None = None,
    **options: Any,
) -> ClippedSum:
    """Twice, since the first batch of a model is probed and the later ones are not."""
    dtype = next(model.parameters()).dtype
    truth = reference_clipped_sum(model, loss, x, y, clip, **options)
    clipped = Clipper(model) if engine is None else partial(engine, model)
    for _ in range(2):
        found = clipped(loss, x, y, clip, **options)
        assert_same(found, truth, dtype)
    return found
