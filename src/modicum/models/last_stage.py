"""A public backbone whose last stage learns with the head: its norms, low-rank adapters, or all of it.

What comes before that stage is fixed and computed once for each record. Before training this is the backbone with
a linear head of zeros, so that whatever a method finds is added to what public records gave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.data.geometry import load_geometry
from modicum.errors import UserError
from modicum.models.backbone import Affine, Backbone, PreActBlock, StandardisedConv, load_backbone
from modicum.models.frozen import UnitNorm, Whitened, frozen
from modicum.models.views import VIEWS, seen

CONSTANT = 0.3  # the feature that stands for a bias: of length 1 it would take half of every clipped gradient


@dataclass(frozen=True)
class Trained:
    """What of the stage is trained beside its norms: convolutions of low rank, or all; and how far it reaches."""

    rank: int = 0
    whole: bool = False
    reach: float = 1.0


class Before(nn.Module):
    """Images to what enters the last stage, for each of a record's views: (B, views, C, H, W)."""

    def __init__(self, backbone: Backbone, views: int) -> None:
        super().__init__()
        self.stem, self.stages, self.views = backbone.stem, backbone.stages[:-1], VIEWS[:views]

    def forward(self, x: Tensor) -> Tensor:
        """Each view goes through the frozen stages by itself."""
        return torch.stack([self._once(seen(x, *view)) for view in self.views], 1)

    def _once(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem((x - 0.5) * 4)
        for stage in self.stages:
            y = stage(y)
        return y


class Reached(nn.Module):
    """A layer that is linear in its parameters, whose parameters are 1/ρ times as large and its outputs ρ times.

    It computes the same. With a reach ρ below 1 its parameters have the share ρ of a clipped gradient; what they
    stand for moves by steps of ρ² of the head's, with ρ times its noise.
    """

    def __init__(self, layer: nn.Module, reach: float) -> None:
        super().__init__()
        self.layer, self.reach = layer, reach
        with torch.no_grad():
            for p in layer.parameters():
                p.div_(reach)

    def forward(self, x: Tensor) -> Tensor:
        """As the layer itself before it was taken in here."""
        outputs: Tensor = self.reach * self.layer(x)
        return outputs


class Adapted(nn.Module):
    """A fixed convolution beside a trained one of low rank, which begins with nothing (Hu et al. 2022)."""

    def __init__(self, conv: nn.Conv2d, rank: int, reach: float) -> None:
        super().__init__()
        self.conv, self.reach = conv, reach
        self.down = nn.Conv2d(conv.in_channels, rank, conv.kernel_size, conv.stride, conv.padding, bias=False)  # type: ignore[arg-type]
        self.up = nn.Conv2d(rank, conv.out_channels, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Both together."""
        added: Tensor = self.conv(x) + self.reach * self.up(self.down(x))
        return added


class FoldedBlock(nn.Module):
    """A backbone's block with plain convolutions, its residual scale inside the second one."""

    def __init__(self, block: PreActBlock, trained: Trained) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(block.norm1, trained), _norm(block.norm2, trained)
        self.conv1 = _conv(block.conv1, trained)
        self.conv2 = _conv(block.conv2, trained, block.scale.item())
        same = isinstance(block.shortcut, nn.Identity)
        self.shortcut = nn.Identity() if same else _conv(block.shortcut, replace(trained, rank=0))

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions beside a short cut."""
        y = functional.relu(self.norm1(x))
        short = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(y)
        added: Tensor = short + self.conv2(functional.relu(self.norm2(self.conv1(y))))
        return added


class After(nn.Module):
    """The last stage, averages over places and over a record's views, the geometry, and a linear head.

    All views of a record are in one loss, hence in one gradient with one clip: they are no further examples. They
    pass one after another, so that the first axis is always that of records.
    """

    def __init__(self, backbone: Backbone, features: nn.Module, size: int, classes: int, trained: Trained):
        super().__init__()
        taps = backbone.shape.taps
        if taps > 2 or len(backbone.stages) < 2:
            raise UserError(
                "the last stage can be trained of backbones with two stages and more, two of them tapped"
            )
        last = backbone.stages[-1]
        assert isinstance(last, nn.Sequential)
        blocks = [FoldedBlock(block, trained) for block in last if isinstance(block, PreActBlock)]
        self.stage = nn.Sequential(*blocks)
        self.norms = nn.ModuleList(_norm(norm, trained) for norm in backbone.norms)
        self.features = features
        self.head = nn.Linear(size + 1, classes, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of records by what was computed of their views."""
        views = [self._pooled(x[:, i]) for i in range(x.shape[1])]
        z = self.features(torch.stack(views).mean(0))
        logits: Tensor = self.head(torch.cat([z, z.new_full((len(z), 1), CONSTANT)], 1))
        return logits

    def _pooled(self, x: Tensor) -> Tensor:
        tapped = [x, self.stage(x)][-len(self.norms) :]
        pairs = zip(self.norms, tapped, strict=True)
        return torch.cat([functional.relu(norm(y)).mean((2, 3)) for norm, y in pairs], 1)


class LastStage(nn.Module):
    """`head(features(x))`: images, the fixed stages with a record's views, and all that is trained."""

    fixed_features = True
    trained_on: tuple[str, ...] = ()  # the datasets that its files are of, where they say

    def __init__(self, before: Before, after: After) -> None:
        super().__init__()
        self.features, self.head = frozen(before), after

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        logits: Tensor = self.head(self.features(x))
        return logits


def last_stage(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    backbone: str | Path | None = None,
    geometry: str | Path | None = None,
    adapters: float = 0,
    whole: float = 0,
    views: float | None = None,
    reach: float = 1.0,
) -> LastStage:
    """Norms and head are trained; `adapters`: also convolutions of that rank beside the stage's own; `whole`: all.

    `geometry` is a file of public geometry behind the same backbone; without one, features are cut to length 1.
    `views` of each record are averaged: 1 image, 2 with its mirror image (default: as the backbone does), up to 10
    with both moved by two pixels. `reach`: the noise in the stage's own parameters is that many times the head's,
    and their steps are the square of it.
    """
    if backbone is None:
        raise UserError("last-stage trains the end of a public backbone: set backbone to its file")
    if not 0 < reach <= 1:
        raise UserError(f"reach is above 0 and at most 1, got {reach:g}")
    kept = load_backbone(backbone)
    model = kept.model
    count = (2 if model.shape.mirror else 1) if views is None else views
    for name, value, most in (("adapters", adapters, 256), ("whole", whole, 1), ("views", count, len(VIEWS))):
        if value != int(value) or not (name == "views") <= value <= most:
            raise UserError(f"{name} is a whole number up to {most}, got {value:g}")
    if input_shape[0] != model.shape.channels or len(input_shape) != 3:
        raise UserError(
            f"{backbone} takes images of {model.shape.channels} channels, these have shape {input_shape}"
        )
    features, size, source = _geometry(geometry, model.shape.features)
    trained = Trained(int(adapters), bool(whole), float(reach))
    made = LastStage(Before(model, int(count)), After(model, features, size, classes, trained))
    made.trained_on = tuple(filter(None, (kept.about.get("proxy"), source)))
    return made


def _geometry(path: str | Path | None, size: int) -> tuple[nn.Module, int, str | None]:
    """The map behind the backbone, its size, and the dataset that it was fitted to."""
    if path is None:
        return UnitNorm(), size, None
    kept = load_geometry(path)
    if len(kept.mean) != size:
        raise UserError(
            f"{path} takes {len(kept.mean)} features and the backbone gives {size}: fit it behind this one"
        )
    map_ = Whitened(torch.from_numpy(kept.mean), torch.from_numpy(kept.matrix))
    return map_, kept.size, kept.about.get("source")


def _norm(norm: nn.Module, trained: Trained) -> nn.Module:
    """A GroupNorm as it is; a scale and a shift as a convolution of single channels, which engines know."""
    return _reached(_scaled(norm) if isinstance(norm, Affine) else norm, trained)


def _reached(layer: nn.Module, trained: Trained) -> nn.Module:
    return layer if trained.reach == 1 else Reached(layer, trained.reach)


def _scaled(norm: Affine) -> nn.Conv2d:
    channels = len(norm.weight)
    conv = nn.Conv2d(channels, channels, 1, groups=channels)
    conv.load_state_dict({"weight": norm.weight[:, None, None, None], "bias": norm.bias})
    return conv


def _conv(conv: nn.Module, trained: Trained, scale: float = 1.0) -> nn.Module:
    """A plain convolution with the same filters times `scale`: trained, fixed, or fixed with an adapter."""
    assert isinstance(conv, nn.Conv2d)
    size = conv.kernel_size
    plain = nn.Conv2d(conv.in_channels, conv.out_channels, size, conv.stride, conv.padding, bias=False)  # type: ignore[arg-type]
    filters = conv.filters() if isinstance(conv, StandardisedConv) else conv.weight
    plain.load_state_dict({"weight": scale * filters.detach()})
    if trained.whole:
        return _reached(plain, trained)
    return Adapted(_fixed(plain), trained.rank, trained.reach) if trained.rank else _fixed(plain)


def _fixed(conv: nn.Conv2d) -> nn.Conv2d:
    frozen(conv)
    return conv
