"""The two families of published networks that are known: inverted residuals and residual networks.

Each is a sequence of convolutions whose BatchNorm is folded into them, so that every image is treated alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LAST = 1e-5  # ε of PyTorch's own BatchNorm


@dataclass(frozen=True)
class Convolution:
    """A convolution with the BatchNorm that follows it, as they are stored."""

    weight: Tensor
    norm: dict[str, Tensor]  # weight, bias, running_mean, running_var

    def folded(self, epsilon: float) -> tuple[Tensor, Tensor]:
        """Filters and shifts of the two together, in evaluation mode."""
        scale = self.norm["weight"].double() / torch.sqrt(self.norm["running_var"].double() + epsilon)
        shift = self.norm["bias"].double() - scale * self.norm["running_mean"].double()
        return (self.weight.double() * scale[:, None, None, None]).float(), shift.float()


class Folded(nn.Module):
    """A convolution with a shift, then the activation; `same`: padded as TensorFlow does."""

    filters: Tensor
    shift: Tensor

    def __init__(
        self, stored: Convolution, epsilon: float, *, stride: int = 1, top: float | None = None, same: bool = False
    ) -> None:
        super().__init__()
        filters, shift = stored.folded(epsilon)
        self.register_buffer("filters", filters)
        self.register_buffer("shift", shift)
        self.stride, self.top, self.same = stride, top, same

    def forward(self, x: Tensor) -> Tensor:
        """`top`: the largest value of the activation; ∞ is ReLU, and None leaves values as they are."""
        x, around = self._padded(x)
        groups = x.shape[1] // self.filters.shape[1]  # of one channel each, or as many as ResNeXt has
        y = functional.conv2d(x, self.filters, self.shift, self.stride, around, 1, groups)
        return y if self.top is None else y.clamp_(0, self.top) if math.isfinite(self.top) else y.relu_()

    def _padded(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """What is uneven is added to the image; the convolution adds the rest, which saves a copy."""
        size = self.filters.shape[2]
        high, wide = (self._pads(length, size) for length in x.shape[2:])
        if high[0] == high[1] and wide[0] == wide[1]:
            return x, (high[0], wide[0])
        return functional.pad(x, [*wide, *high]), (0, 0)

    def _pads(self, length: int, size: int) -> tuple[int, int]:
        if not self.same:
            return size // 2, size // 2
        missing = max((-(-length // self.stride) - 1) * self.stride + size - length, 0)
        return missing // 2, missing - missing // 2


class Residual(nn.Module):
    """Convolutions beside a short cut, or alone; `top` as of the activation after their sum."""

    def __init__(self, body: nn.Module, short: nn.Module | None, top: float | None = None) -> None:
        super().__init__()
        self.body, self.short, self.top = body, short, top

    def forward(self, x: Tensor) -> Tensor:
        """Both together."""
        y: Tensor = self.body(x)
        y = y if self.short is None else y + self.short(x)
        return y if self.top is None else y.relu_()


class Staged(nn.Module):
    """Prepared images to the averages over the last `taps` of: stages, and the head after them."""

    def __init__(
        self, stem: nn.Module, stages: list[nn.Sequential], widths: list[int], head: Folded | None
    ) -> None:
        super().__init__()
        self.stem, self.stages = stem, nn.ModuleList(stages)
        self.head = nn.Identity() if head is None else head
        self.widths = widths if head is None else [*widths[:-1], len(head.shift)]

    def forward(self, x: Tensor, taps: int = 1) -> Tensor:
        """One feature for each channel that is tapped."""
        y, pooled = self.stem(x), []
        for i, stage in enumerate(self.stages):
            y = stage(y)
            y = self.head(y) if i == len(self.stages) - 1 else y
            if i >= len(self.stages) - taps:
                pooled.append(y.mean((2, 3)))
        return torch.cat(pooled, 1)


STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of the stages of MobileNetV2 and EfficientNet-Lite
SIX = 6.0


def inverted_residuals(
    stem: Convolution, blocks: list[list[Convolution]], head: Convolution, epsilon: float, *, same: bool
) -> Staged:
    """MobileNetV2 (Sandler et al. 2018), EfficientNet-Lite (Liu 2020). A stage begins where its width changes."""
    stages: list[list[nn.Module]] = []
    widths: list[int] = []
    inner = len(stem.weight)
    for block in blocks:
        out = len(block[-1].weight)
        begins = not widths or out != widths[-1]
        if begins:
            stages.append([])
            widths.append(out)
        stride = STRIDES[len(stages) - 1] if begins else 1
        *first, last = block
        layers: list[nn.Module] = [
            Folded(c, epsilon, stride=stride if c is first[-1] else 1, top=SIX, same=same) for c in first
        ]
        body = nn.Sequential(*layers, Folded(last, epsilon))
        stages[-1].append(Residual(body, nn.Identity() if stride == 1 and inner == out else None))
        inner = out
    entry = Folded(stem, epsilon, stride=2, top=SIX, same=same)
    return Staged(entry, [nn.Sequential(*s) for s in stages], widths, Folded(head, epsilon, top=SIX))


@dataclass(frozen=True)
class ResidualBlock:
    """The convolutions of a block, and that of its short cut where the shape changes."""

    body: list[Convolution]
    short: Convolution | None


def residual_network(stem: Convolution, stages: list[list[ResidualBlock]]) -> Staged:
    """ResNet (He et al. 2016), the stride in a block's first 3×3 convolution as torchvision has it."""
    built, widths = [], []
    for i, stage in enumerate(stages):
        layers: list[nn.Module] = []
        for j, block in enumerate(stage):
            stride = 2 if i and not j else 1
            strided = next(k for k, c in enumerate(block.body) if c.weight.shape[2] == 3)
            *first, last = block.body
            body: list[nn.Module] = [
                Folded(c, LAST, stride=stride if k == strided else 1, top=math.inf) for k, c in enumerate(first)
            ]
            body.append(Folded(last, LAST, stride=stride if strided == len(first) else 1))
            short = nn.Identity() if block.short is None else Folded(block.short, LAST, stride=stride)
            layers.append(Residual(nn.Sequential(*body), short, math.inf))
        built.append(nn.Sequential(*layers))
        widths.append(len(stage[-1].body[-1].weight))
    entry = nn.Sequential(Folded(stem, LAST, stride=2, top=math.inf), nn.MaxPool2d(3, 2, 1))
    return Staged(entry, built, widths, None)
