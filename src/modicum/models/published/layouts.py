"""How libraries name the arrays of a network: from a state dict to the network, whoever wrote it.

What a state dict does not say (strides, padding, the ε of norms) belongs to its layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from modicum.errors import UserError
from modicum.models.published import vision_transformers
from modicum.models.published.networks import (
    LAST,
    Convolution,
    ResidualBlock,
    Staged,
    inverted_residuals,
    residual_network,
)
from modicum.models.published.vision_transformers import LAYOUT, Tokens
from modicum.models.published.weights import State

Made = TypeVar("Made", bound=nn.Module)
Pair = tuple[str, str]  # names of a convolution and of its norm, after the block's own
NORM = ("weight", "bias", "running_mean", "running_var")
AFTER = r"^_?(?:fc|classifier|head)\.|\.num_batches_tracked$"
TIMM = "EfficientNet-Lite or MobileNetV2 (timm)"
TENSORFLOW = 1e-3  # ε of norms in networks that were trained there


@dataclass(frozen=True)
class Inverted:
    """Names in a network of inverted residuals."""

    name: str
    stem: Pair
    head: Pair
    block: str  # a pattern for the prefix of a block
    forms: tuple[tuple[Pair, ...], ...]  # of its convolutions in order; the first that is there holds
    epsilon: float = LAST
    same: bool = False  # padded as TensorFlow does
    entry: tuple[Pair, ...] = ()  # the first block, where it is named otherwise

    def network(self, state: State) -> Staged:
        """The network of these arrays."""
        blocks = [self._block(state, prefix) for prefix in prefixes(state, self.block)]
        first = [[convolution(state, *pair) for pair in self.entry]] if self.entry else []
        return inverted_residuals(
            convolution(state, *self.stem),
            [*first, *blocks],
            convolution(state, *self.head),
            self.epsilon,
            same=self.same,
        )

    def _block(self, state: State, prefix: str) -> list[Convolution]:
        form = next((f for f in self.forms if all(f"{prefix}{c}.weight" in state for c, _ in f)), None)
        if form is None:
            raise UserError(f"no block of {self.name}: {prefix.rstrip('.')}")
        return [convolution(state, prefix + c, prefix + n) for c, n in form]


@dataclass(frozen=True)
class Residuals:
    """Names in a residual network."""

    name: str
    stem: Pair
    stages: str  # a pattern for the prefix of a stage
    block: str  # a pattern for the prefix of a block after it
    body: tuple[Pair, ...]
    short: Pair

    def network(self, state: State) -> Staged:
        """The network of these arrays."""
        stages = [
            [self._block(state, block) for block in prefixes(state, re.escape(stage) + self.block)]
            for stage in prefixes(state, self.stages)
        ]
        return residual_network(convolution(state, *self.stem), stages)

    def _block(self, state: State, prefix: str) -> ResidualBlock:
        body = [convolution(state, prefix + c, prefix + n) for c, n in self.body if f"{prefix}{c}.weight" in state]
        conv, norm = (prefix + name for name in self.short)
        return ResidualBlock(body, convolution(state, conv, norm) if f"{conv}.weight" in state else None)


_HF_LAYER = "mobilenet_v2.conv_stem."
LAYOUTS: tuple[Inverted | Residuals, ...] = (
    Inverted(
        "EfficientNet-Lite (efficientnet_lite_pytorch)",
        ("_conv_stem", "_bn0"),
        ("_conv_head", "_bn1"),
        r"_blocks\.\d+\.",
        (
            (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2")),
            (("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2")),
        ),
        TENSORFLOW,
        same=True,
    ),
    Inverted(
        TIMM,
        ("conv_stem", "bn1"),
        ("conv_head", "bn2"),
        r"blocks\.\d+\.\d+\.",
        (
            (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3")),
            (("conv_dw", "bn1"), ("conv_pw", "bn2")),
        ),
    ),
    Inverted(
        "MobileNetV2 (torchvision)",
        ("features.0.0", "features.0.1"),
        ("features.18.0", "features.18.1"),
        r"features\.\d+\.(?=conv\.)",
        (
            (("conv.0.0", "conv.0.1"), ("conv.1.0", "conv.1.1"), ("conv.2", "conv.3")),
            (("conv.0.0", "conv.0.1"), ("conv.1", "conv.2")),
        ),
    ),
    Inverted(
        "MobileNetV2 (Hugging Face)",
        (f"{_HF_LAYER}first_conv.convolution", f"{_HF_LAYER}first_conv.normalization"),
        ("mobilenet_v2.conv_1x1.convolution", "mobilenet_v2.conv_1x1.normalization"),
        r"mobilenet_v2\.layer\.\d+\.",
        (
            tuple(
                (f"{part}.convolution", f"{part}.normalization")
                for part in ("expand_1x1", "conv_3x3", "reduce_1x1")
            ),
        ),
        TENSORFLOW,
        same=True,
        entry=tuple(
            (f"{_HF_LAYER}{part}.convolution", f"{_HF_LAYER}{part}.normalization")
            for part in ("conv_3x3", "reduce_1x1")
        ),
    ),
    Residuals(
        "ResNet (torchvision, timm)",
        ("conv1", "bn1"),
        r"layer\d+\.",
        r"\d+\.",
        (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3")),
        ("downsample.0", "downsample.1"),
    ),
    Residuals(
        "ResNet (Hugging Face)",
        ("resnet.embedder.embedder.convolution", "resnet.embedder.embedder.normalization"),
        r"resnet\.encoder\.stages\.\d+\.",
        r"layers\.\d+\.",
        tuple((f"layer.{i}.convolution", f"layer.{i}.normalization") for i in range(3)),
        ("shortcut.convolution", "shortcut.normalization"),
    ),
)


def network_of(
    state: State, *, tensorflow: bool | None = None, heads: int | None = None
) -> tuple[Staged | Tokens, str]:
    """The network that these arrays belong to, and the name of its layout.

    Args:
        state: Arrays by name.
        tensorflow: Whether it was trained in TensorFlow, where names alone do not say (timm's `tf_` networks).
        heads: Of a vision transformer, where something says it; its width decides otherwise.

    Returns:
        The network with its BatchNorms folded, and its layout's name.

    Raises:
        UserError: Where the names belong to no layout that is known, or an array is missing.
    """
    for layout in LAYOUTS:
        if f"{layout.stem[0]}.weight" in state and f"{layout.stem[1]}.running_var" in state:
            if isinstance(layout, Inverted) and tensorflow:
                layout = Inverted(**{**vars(layout), "epsilon": TENSORFLOW, "same": True})
            noted = Noted(state)
            made = _made(layout.name, partial(layout.network, noted))
            if left := noted.left():
                raise UserError(f"these weights look like {layout.name}, which has no {', '.join(left[:3])}")
            return made, layout.name
    if vision_transformers.is_one(renamed := vision_transformers.renamed(state)):
        return _made(LAYOUT, partial(Tokens, renamed, heads)), LAYOUT
    known = "; ".join([*(layout.name for layout in LAYOUTS), LAYOUT])
    raise UserError(f"the names of these arrays belong to no network that is known here: known are {known}")


class Noted(dict[str, Tensor]):
    """Arrays by name that knows which were asked for: a network with others besides is of another kind."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.read = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def left(self) -> list[str]:
        """Those of layers before the classifier that nobody asked for."""
        return sorted(name for name in self if name not in self.read and not re.search(AFTER, name))


def _made(name: str, network: Callable[[], Made]) -> Made:
    try:
        return network()
    except (KeyError, IndexError, ValueError, StopIteration, RuntimeError) as error:
        raise UserError(f"these weights look like {name}, but do not fit it ({error})") from None


def convolution(state: State, name: str, norm: str) -> Convolution:
    """A convolution with its norm."""
    return Convolution(state[f"{name}.weight"], {part: state[f"{norm}.{part}"] for part in NORM})


def prefixes(state: State, pattern: str) -> list[str]:
    """The different beginnings of names that a pattern matches, by their numbers."""
    found = {match[0] for name in state if (match := re.match(pattern, name))}
    return sorted(found, key=lambda text: [int(number) for number in re.findall(r"\d+", text)])
