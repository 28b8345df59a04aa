"""Small convolutional networks. All return logits: log-softmax belongs to the loss, where it is idempotent."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from modicum.errors import UserError


def cnn_small(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions, ReLU, max pooling and a linear layer (PAC-DP, MNIST).

    The paper gives neither widths nor kernels; 16 and 32 channels of 5×5 keep the noise's dimension low
    (28,938 parameters on MNIST).
    """
    channels, height, width = image(input_shape, smallest=4)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            head=nn.Linear(32 * (height // 4) * (width // 4), classes),
        )
    )


def lenet(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling; 28×28 inputs are padded to 32×32 as there."""
    channels, height, width = image(input_shape, smallest=12)
    pad = 2 if min(height, width) < 32 else 0
    flat = 16 * (((height + 2 * pad - 4) // 2 - 4) // 2) * (((width + 2 * pad - 4) // 2 - 4) // 2)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=pad),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(flat, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            head=nn.Linear(84, classes),
        )
    )


def lenet_sigmoid(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network of Zhu et al. (2019): smooth, wide enough to leak, all parameters from U(−0.5, 0.5).

    For attacks: whoever cannot invert this one has a broken attack.
    """
    channels, height, width = image(input_shape, smallest=8)
    flat = 12 * -(-height // 4) * -(-width // 4)
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 12, 5, stride=2, padding=2),
            sigmoid1=nn.Sigmoid(),
            conv2=nn.Conv2d(12, 12, 5, stride=2, padding=2),
            sigmoid2=nn.Sigmoid(),
            conv3=nn.Conv2d(12, 12, 5, padding=2),
            sigmoid3=nn.Sigmoid(),
            flatten=nn.Flatten(),
            head=nn.Linear(flat, classes),
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    return model


def cnn8(input_shape: tuple[int, ...], classes: int, *, width: int = 32) -> nn.Module:
    """Eight weighted layers (ACDP-pFSD, EMNIST): three pairs of 3×3 convolutions, then two linear layers.

    The paper says "a simple 8-layer CNN" and no more. GroupNorm after each convolution makes the few local steps
    of a round count; the two linear layers are the ones that FedPer keeps personal. `width` is that of the first
    pair; the others have twice and four times as many channels. Resolution is halved inside each pair, by a stride
    in the first and by pooling in the others: a quarter of the work of pooling after them, as many parameters.
    """
    channels, high, wide = image(input_shape, smallest=8)
    if int(width) != width or width < 8 or width % 8:
        raise UserError(f"the width of cnn8 is a multiple of 8, got {width}")
    width = int(width)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, out in enumerate((width, width, 2 * width, 2 * width, 4 * width, 4 * width), start=1):
        layers[f"conv{i}"] = nn.Conv2d(channels, out, 3, stride=2 if i == 1 else 1, padding=1)
        layers[f"norm{i}"] = nn.GroupNorm(8, out)
        layers[f"relu{i}"] = nn.ReLU()
        if i in (3, 5):
            layers[f"pool{i // 2}"] = nn.MaxPool2d(2)
        channels = out
    layers["flatten"] = nn.Flatten()
    layers["fc1"] = nn.Linear(4 * width * (high // 8) * (wide // 8), 4 * width)
    layers["relu7"] = nn.ReLU()
    layers["head"] = nn.Linear(4 * width, classes)
    return nn.Sequential(layers)


def image(input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Channels, height and width of records that are images of at least this size; others are refused."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise UserError(
            f"this model takes images (channels, height, width) of at least {smallest}×{smallest}, got inputs of "
            f"shape {input_shape}: use logistic or mlp for other data"
        )
    channels, height, width = input_shape
    return channels, height, width
