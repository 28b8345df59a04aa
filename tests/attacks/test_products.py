"""Convolutions as products of patches: the same numbers, through two derivatives."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from modicum.attacks.inversion.products import AsProducts


def gradients_of_gradients(model: nn.Module, x: Tensor, *, products: bool) -> tuple[Tensor, Tensor]:
    """Each record's squared gradient, and what that has for its own gradient by the record."""
    named = {name: value.detach() for name, value in model.named_parameters()}

    def loss(theta: dict[str, Tensor], row: Tensor) -> Tensor:
        out: Tensor = functional_call(model, theta, (row[None],)).square().sum()
        return out

    rows = x.clone().requires_grad_()
    with AsProducts() if products else nullcontext():
        each = vmap(grad(loss), (None, 0))(named, rows)
        squares = sum(part.flatten(1).square().sum(1) for part in each.values())
    assert isinstance(squares, Tensor)
    return squares.detach(), torch.autograd.grad(squares.sum(), rows)[0]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3),
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False),
        nn.Conv2d(2, 4, 3, padding=1, groups=2),  # these two are left to torch
        nn.Conv2d(2, 3, 3, padding="same"),
    ],
)
def test_they_are_the_convolutions(layer: nn.Conv2d) -> None:
    model = nn.Sequential(layer, nn.Sigmoid(), nn.Flatten()).double()
    x = torch.randn(3, 2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, as_products = (gradients_of_gradients(model, x, products=way) for way in (False, True))
    for mine, theirs in zip(as_products, plain, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_within_it_no_message_has_a_convolution_of_its_own() -> None:
    """A convolution that stayed one would leave its own node behind."""
    x = torch.randn(2, 1, 6, 6, requires_grad=True)
    weight = torch.randn(3, 1, 3, 3, requires_grad=True)
    plain = nn.functional.conv2d(x, weight)
    with AsProducts():
        made = nn.functional.conv2d(x, weight)
    assert "Convolution" in str(plain.grad_fn)
    assert "Convolution" not in str(made.grad_fn)
