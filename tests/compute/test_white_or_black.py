"""A server that sends weights of 10¹² to ask whether the last of many images is white or black."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Flat, clipped_sum
from modicum.models import build
from tests.compute.helpers import cross_entropy

M, V = 2.0**40, 128.0


def hostile() -> nn.Module:
    """The second convolution sees M where an image is white. Class 2 asks it to grow at one place and to shrink at
    another, which cancels for a record alone; class 1 asks all others the same, which does not."""
    model = build("cnn-small", (1, 28, 28), 10, seed=0)
    conv1, conv2, head = model.conv1, model.conv2, model.head
    asked = torch.zeros(32, 7, 7)
    asked[:, 2, 2], asked[:, 4, 4] = V, -V
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        conv1.bias.fill_(1.0)
        conv1.weight[:, 0, 2, 2] = M
        conv2.bias.fill_(1e-3)
        head.weight[1], head.weight[2] = -V, asked.flatten()
        head.bias.fill_(-200.0)
        head.bias[3] = 0.0
    return model


def records(number: int, last: float) -> tuple[Tensor, Tensor]:
    x, y = torch.zeros(number, 1, 28, 28), torch.ones(number, dtype=torch.long)
    x[-1], y[-1] = last, 2
    return x, y


def moved(white: dict[str, Tensor], black: dict[str, Tensor]) -> float:
    return float(torch.cat([(white[k].double() - black[k].double()).flatten() for k in white]).norm())


@pytest.mark.parametrize("number", [150, pytest.param(1400, marks=pytest.mark.heavy)])
def test_a_sum_tells_no_more_than_a_replaced_record_may(number: int) -> None:
    model = hostile()
    sums = [clipped_sum(model, cross_entropy, *records(number, last), Flat(1.0)).total for last in (1.0, 0.0)]
    assert moved(*sums) <= 2 * (1 + 1e-3)


def test_one_product_of_the_whole_batch_is_caught() -> None:
    """Negative control: factors from each record's own norm, and the sum by a second backward pass in float32."""
    model = hostile()
    names, parameters = zip(*model.named_parameters(), strict=True)
    sums = []
    for last in (1.0, 0.0):
        x, y = records(150, last)
        factors = torch.full((150,), 1 / 597_694)
        factors[-1] = 1 / 1.4154
        losses = cross_entropy(model(x), y)
        sums.append(dict(zip(names, torch.autograd.grad((losses * factors).sum(), parameters), strict=True)))
    assert moved(*sums) > 20  # seen: 74 and more
