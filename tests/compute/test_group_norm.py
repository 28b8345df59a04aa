"""Group norms with a pass of their own compute what torch's do, in any memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat, SlowClippingWarning, reference_clipped_sum
from modicum.compute.clipping import group_norm
from tests.compute.helpers import assert_same, cross_entropy

SHAPES = [(3, 6), (3, 6, 5), (3, 6, 4, 5)]


def backwards(x: Tensor) -> Tensor:
    """The same numbers with the first dimension last in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lay_out", [torch.Tensor.contiguous, backwards])
def test_outputs_and_gradients_are_torchs(shape: tuple[int, ...], lay_out: object) -> None:
    torch.manual_seed(0)
    layer = nn.GroupNorm(2, 6, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = lay_out(torch.randn(shape, dtype=torch.float64) + 1).requires_grad_()  # type: ignore[operator]
    seed = torch.randn(shape, dtype=torch.float64)
    seen: list[Tensor] = []
    found = group_norm.normalise(x, layer, torch.zeros((), requires_grad=True), lambda *ts: seen.extend(ts))
    truth = layer(x)
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(*(torch.autograd.grad(t, x, seed, retain_graph=True)[0] for t in (found, truth)))
    gradient, *each = seen
    assert torch.equal(gradient, seed)
    for i in range(shape[0]):
        alone = torch.autograd.grad(truth[i], (layer.weight, layer.bias), seed[i], retain_graph=True)
        torch.testing.assert_close(tuple(t[i] for t in each), alone)


class Twice(nn.Module):
    """One norm used twice, the second time with its input changed by a ReLU in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.conv(x)))
        return self.head(self.norm(y).relu_().flatten(1))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_model_with_a_shared_norm(form: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Twice().double().to(memory_format=form)
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64).to(memory_format=form)
    y = torch.randint(3, (5,))
    truth = reference_clipped_sum(model, cross_entropy, x, y, Flat(0.3))
    clipped = Clipper(model)
    for _ in range(3):
        assert_same(clipped(cross_entropy, x, y, Flat(0.3)), truth, torch.float64)
    assert "forward" not in vars(model.norm)


def test_a_forward_function_that_somebody_has_put_in_place_stays() -> None:
    torch.manual_seed(0)
    model = Twice().double()
    own = model.norm.forward
    model.norm.forward = lambda x: 2 * own(x)  # type: ignore[method-assign]
    x, y = torch.randn(5, 1, 6, 6, dtype=torch.float64), torch.randint(3, (5,))
    truth = reference_clipped_sum(model, cross_entropy, x, y, Flat(0.3))
    clipped = Clipper(model)
    with pytest.warns(SlowClippingWarning):  # its weight is used in another way than the layer's
        assert_same(clipped(cross_entropy, x, y, Flat(0.3)), truth, torch.float64)
    assert_same(clipped(cross_entropy, x, y, Flat(0.3)), truth, torch.float64)
    assert "forward" in vars(model.norm)
