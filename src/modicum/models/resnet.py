"""ResNets for 32×32 images (He et al. 2016): a 3×3 stem, no max pooling, GroupNorm instead of BatchNorm."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from modicum.errors import UserError

GROUPS = 32


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.GroupNorm(GROUPS, out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions beside a short cut."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return torch.relu(y + self.shortcut(x))


def resnet18(input_shape: tuple[int, ...], classes: int, *, dropout: float = 0.0) -> nn.Module:
    """ResNet-18; PAC-DP puts dropout before the head, with a rate that it does not give (0 here)."""
    return _resnet((2, 2, 2, 2), input_shape, classes, dropout)


def resnet34(input_shape: tuple[int, ...], classes: int, *, dropout: float = 0.0) -> nn.Module:
    """ResNet-34."""
    return _resnet((3, 4, 6, 3), input_shape, classes, dropout)


def _resnet(blocks: tuple[int, ...], input_shape: tuple[int, ...], classes: int, dropout: float) -> nn.Module:
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        raise UserError(
            f"a ResNet takes images (channels, height, width) of at least 8×8, got inputs of shape {input_shape}"
        )
    if not 0 <= dropout < 1:
        raise UserError(f"dropout must lie in [0, 1), got {dropout}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False),
        norm=nn.GroupNorm(GROUPS, 64),
        relu=nn.ReLU(),
    )
    channels = 64
    for stage, (out, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True), start=1):
        for i in range(count):
            stride = 2 if stage > 1 and i == 0 else 1
            layers[f"stage{stage}_{i}"] = ResidualBlock(channels, out, stride)
            channels = out
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    if dropout > 0:
        layers["dropout"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(512, classes)
    return nn.Sequential(layers)
