"""A convolutional network that is trained on public data and then only computes features.

A narrow wide-ResNet (Zagoruyko & Komodakis 2016). Its norms are GroupNorm with weight standardisation (Qiao et al.
2019; De et al. 2022 use the pair), or plain scales and shifts that stand for batch statistics of public records:
either way each example is treated alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.errors import DAMAGED, UserError

FORMAT = "modicum-backbone-1"
Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class BackboneShape:
    """How the network is built; stored beside its weights."""

    channels: int
    widths: tuple[int, ...] = (64, 128, 256)
    blocks: int = 2
    groups: int = 16
    taps: int = 2  # features are the averages over the last `taps` stages
    mirror: bool = False  # average the features of an image and its mirror image
    norm: Literal["group", "affine"] = "group"

    @property
    def features(self) -> int:
        """How many features come out: the widths of the last stages that are tapped."""
        return sum(self.widths[-self.taps :])


class StandardisedConv(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1/fan-in."""

    def forward(self, x: Tensor) -> Tensor:
        """A convolution whose kernels are brought to mean 0 and variance 1/fan-in."""
        return functional.conv2d(x, self.filters().to(x.dtype), None, self.stride, self.padding)

    def filters(self) -> Tensor:
        """The kernels as they are used."""
        w = self.weight.float()
        size = w.std((1, 2, 3), keepdim=True) * w[0].numel() ** 0.5 + 1e-6
        filters: Tensor = (w - w.mean((1, 2, 3), keepdim=True)) / size
        return filters


class Affine(nn.Module):
    """A scale and a shift for each channel: what is left of a BatchNorm once its statistics stand still."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """A scale and a shift for each channel."""
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def _conv(shape: BackboneShape, inner: int, out: int, size: int, stride: int) -> nn.Conv2d:
    kind = StandardisedConv if shape.norm == "group" else nn.Conv2d
    return kind(inner, out, size, stride, size // 2, bias=False)


def _norm(shape: BackboneShape, channels: int) -> nn.Module:
    return nn.GroupNorm(shape.groups, channels) if shape.norm == "group" else Affine(channels)


class PreActBlock(nn.Module):
    """Norm, ReLU, convolution, twice; the shortcut is plain, or a 1×1 convolution where the shape changes."""

    def __init__(self, inner: int, out: int, stride: int, shape: BackboneShape) -> None:
        super().__init__()
        self.norm1 = _norm(shape, inner)
        self.conv1 = _conv(shape, inner, out, 3, stride)
        self.norm2 = _norm(shape, out)
        self.conv2 = _conv(shape, out, out, 3, 1)
        same = stride == 1 and inner == out
        self.shortcut: nn.Module = nn.Identity() if same else _conv(shape, inner, out, 1, stride)
        self.scale = nn.Parameter(torch.full((), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions beside a short cut."""
        y = functional.relu(self.norm1(x))
        short = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(functional.relu(self.norm2(y)))
        added: Tensor = short + self.scale * y
        return added


class Backbone(nn.Module):
    """Images with values in [0, 1] to features."""

    def __init__(self, shape: BackboneShape) -> None:
        super().__init__()
        self.shape = shape
        self.stem = _conv(shape, shape.channels, shape.widths[0], 3, 1)
        stages, inner = [], shape.widths[0]
        for i, out in enumerate(shape.widths):
            strides = [2 if i else 1] + [1] * (shape.blocks - 1)
            stage = []
            for stride in strides:
                stage.append(PreActBlock(inner, out, stride, shape))
                inner = out
            stages.append(nn.Sequential(*stage))
        self.stages = nn.ModuleList(stages)
        self.norms = nn.ModuleList(_norm(shape, w) for w in shape.widths[-shape.taps :])

    def forward(self, x: Tensor) -> Tensor:
        """Features, in evaluation the mean of those of the image and its mirror image where that is asked for."""
        if self.shape.mirror and not self.training:
            return (self._once(x) + self._once(x.flip(-1))) / 2
        return self._once(x)

    def _once(self, x: Tensor) -> Tensor:
        y = self.stem((x - 0.5) * 4)
        first_tap = len(self.stages) - self.shape.taps
        pooled = []
        for i, stage in enumerate(self.stages):
            y = stage(y)
            if i >= first_tap:
                pooled.append(functional.relu(self.norms[i - first_tap](y)).mean((2, 3)))
        return torch.cat(pooled, 1)


def with_statistics(model: Backbone) -> Backbone:
    """The same network with a BatchNorm in place of every scale and shift, for training on public records."""
    for parent, name, part in _parts(model, Affine):
        norm = nn.BatchNorm2d(len(part.weight))
        norm.load_state_dict({**norm.state_dict(), "weight": part.weight, "bias": part.bias})
        setattr(parent, name, norm)
    return model


def settled(model: Backbone) -> Backbone:
    """The inverse: each BatchNorm's running statistics become a scale and a shift."""
    for parent, name, norm in _parts(model, nn.BatchNorm2d):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        affine = Affine(norm.num_features)
        scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        affine.load_state_dict({"weight": scale, "bias": norm.bias.detach() - scale * norm.running_mean})
        setattr(parent, name, affine)
    return model


def _parts(model: nn.Module, kind: type[Part]) -> list[tuple[nn.Module, str, Part]]:
    return [(p, n, c) for p in model.modules() for n, c in p.named_children() if isinstance(c, kind)]


@dataclass(frozen=True)
class TrainedBackbone:
    """A backbone with where it comes from."""

    model: Backbone
    about: dict[str, Any] = field(default_factory=dict)  # proxy, records, steps, held-out accuracy


def save_backbone(model: Backbone, path: str | Path, about: dict[str, Any]) -> None:
    """Weights in half precision with the shape and the origin, in numpy's own format (no pickles)."""
    arrays = {name: t.detach().cpu().numpy().astype(np.float16) for name, t in model.state_dict().items()}
    header = json.dumps({"format": FORMAT, "shape": asdict(model.shape), "about": about})
    np.savez_compressed(path, header=np.array(header), **arrays)


def load_backbone(path: str | Path) -> TrainedBackbone:
    """The backbone of a file, with its statistics; another format, or values that are not finite, are refused with
    a line. Nothing is made that is larger than the file's own arrays say."""
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']!r}")
            about, model = dict(header["about"]), _empty(header["shape"], len(file.files))
            if sum(info.file_size for info in file.zip.infolist()) > _most_bytes(model):
                raise ValueError("its arrays are larger than its shape says")
            state = {name: _array(file[name]) for name in file.files if name != "header"}
        model.load_state_dict(state, assign=True)
    except FileNotFoundError:
        raise UserError(
            f"no backbone at {path}: train one with python -m modicum.public.pretrain --proxy NAME --out FILE"
        ) from None
    except (*DAMAGED, OSError) as error:
        said = str(error).split("\n", 1)[0]
        raise UserError(f"{path} is not a backbone of this version ({said}): train it again") from None
    model.eval()
    return TrainedBackbone(model, about)


def _empty(said: dict[str, Any], arrays: int) -> Backbone:
    """A network without numbers: whoever wrote the file may have claimed any shape."""
    shape = BackboneShape(**{**said, "widths": tuple(said["widths"])})
    blocks = len(shape.widths) * shape.blocks
    if not 0 < blocks < arrays or not 0 < shape.taps <= len(shape.widths) or shape.norm not in ("group", "affine"):
        raise ValueError("no shape of a backbone")
    with torch.device("meta"):
        return Backbone(shape)


def _most_bytes(model: Backbone) -> int:
    """Of the arrays of a file: eight bytes a number, and a page for each and for what was written about them."""
    return sum(8 * p.numel() + (1 << 12) for p in model.parameters()) + (1 << 20)


def _array(values: np.ndarray) -> Tensor:
    if values.dtype.kind != "f" or not np.isfinite(values).all():
        raise ValueError("an array holds values that are not finite")
    return torch.from_numpy(values.astype(np.float32))
