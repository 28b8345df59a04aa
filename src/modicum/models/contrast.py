"""Networks that stand much noise from nothing: what decides there is how far gradients of different records agree.

Local contrast is normalised, the first layer is rectified by |·|, and pooling takes means (Jarrett et al. 2009,
"What is the best multi-stage architecture for object recognition?"). Nothing of this has a parameter.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from modicum.models.cnn import image

GAIN = 1.2  # of the first weights over Glorot's
FLOOR = 0.03  # of a local spread


class LocalContrast(nn.Module):
    """Each pixel less the mean grey around it, over the spread around it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Images of the same shape."""
        centred = x - self._around(x.mean(1, keepdim=True))
        spread = self._around(centred.square().mean(1, keepdim=True)).sqrt()
        return centred / (spread + FLOOR)

    def _around(self, x: Tensor) -> Tensor:
        return avg_pool2d(x, self.size, 1, self.size // 2, count_include_pad=False)


class Absolute(nn.Module):
    """|x|: an edge counts alike whichever side of it is bright."""

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return x.abs()


def lenet_contrast(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5."""
    channels, height, width = image(input_shape, smallest=12)
    pad = 2 if min(height, width) < 32 else 0
    flat = 16 * (((height + 2 * pad - 4) // 2 - 4) // 2) * (((width + 2 * pad - 4) // 2 - 4) // 2)
    return _drawn(
        OrderedDict(
            contrast=LocalContrast(9),
            conv1=nn.Conv2d(channels, 6, 5, padding=pad),
            rectified=Absolute(),
            pool1=nn.AvgPool2d(2, divisor_override=2),
            norm1=nn.GroupNorm(1, 6, affine=False),
            conv2=nn.Conv2d(6, 16, 5),
            tanh2=nn.Tanh(),
            pool2=nn.AvgPool2d(2, divisor_override=2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(flat, 120),
            tanh3=nn.Tanh(),
            fc2=nn.Linear(120, 84),
            tanh4=nn.Tanh(),
            head=nn.Linear(84, classes),
        )
    )


def cnn_contrast(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Convolutions of 32 and 64 channels and a linear layer: 31,178 parameters on 32×32 colour images."""
    channels, height, width = image(input_shape, smallest=8)
    return _drawn(
        OrderedDict(
            contrast=LocalContrast(5),
            conv1=nn.Conv2d(channels, 32, 5, padding=2),
            rectified=Absolute(),
            pool1=nn.AvgPool2d(2),
            norm1=nn.GroupNorm(1, 32, affine=False),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.AvgPool2d(4),
            norm2=nn.GroupNorm(1, 64, affine=False),
            flatten=nn.Flatten(),
            head=nn.Linear(64 * (height // 8) * (width // 8), classes),
        )
    )


def _drawn(layers: OrderedDict[str, nn.Module]) -> nn.Module:
    for layer in layers.values():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(layer.weight, GAIN)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(layers)
