"""The head whose bias weighs no more than a feature."""

import pytest
import torch
from torch import nn

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Flat
from modicum.core.parts import Batch
from modicum.errors import UserError
from modicum.models import build
from modicum.models.frozen import FixedFeatures, UnitNorm
from modicum.models.split import fixed_features
from modicum.training.plain import Supervised
from modicum.training.small_bias import SmallBias, SmallBiasHead

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def wrapped(model: nn.Module, length: float = 0.3) -> nn.Module:
    return SmallBias(length).wrap(model)


@pytest.mark.parametrize("model", [build("logistic", (5,), 3, seed=0), FixedFeatures(UnitNorm(), 5, 3)])
def test_it_is_the_same_function_on_records_of_length_one(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
        unit = nn.functional.normalize(X, dim=1)
        before = model(unit)
        assert torch.allclose(wrapped(model)(unit), before, atol=1e-6)


def test_records_are_cut_one_by_one_and_short_ones_stay() -> None:
    made = wrapped(build("logistic", (5,), 3, seed=0))
    split = fixed_features(made)
    assert split is not None
    features, _ = split
    cut = features(torch.cat([100 * X, 0.01 * X]))
    assert torch.allclose(cut[:6], nn.functional.normalize(X, dim=1), atol=1e-6)
    assert torch.allclose(cut[6:], 0.01 * X)


@pytest.mark.parametrize("length", [0.3, 1.0])
def test_a_bias_takes_kappa_of_a_records_gradient(length: float) -> None:
    """‖g‖² = ‖p − y‖²·(1 + κ²) for a record of length 1: what is clipped is told apart from a plain layer's."""
    split = fixed_features(wrapped(build("logistic", (5,), 3, seed=0), length))
    assert split is not None
    features, head = split
    assert isinstance(head, SmallBiasHead)
    head.load(torch.zeros(3, 5), torch.zeros(3))
    backend = LoopBackend(head)
    batch = Batch(features(100 * X), {"y": Y})
    theta = backend.layout.read(head)[None]
    _, norms = backend.clipped_sums(theta, [batch], Supervised().losses, [Flat(1e9)])
    expected = ((2 / 3) ** 2 + 2 / 9) * (1 + length**2)
    assert torch.allclose(norms[0].double() ** 2, torch.full((6,), expected).double(), rtol=1e-5)


def test_other_models_are_refused() -> None:
    for model in (build("mlp", (5,), 3), nn.Linear(5, 3, bias=False)):
        with pytest.raises(UserError, match="name a method"):
            wrapped(model)
