"""LLCM, FedCompDP's compression: a 1×1 projection to fewer channels inside a network, and what follows narrowed.

Fewer parameters are fewer coordinates that noise falls on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.errors import UserError

Layer = nn.Conv2d | nn.Linear
OPTION, AFTER, FROZEN = "compress", "compress_after", "compress_frozen"  # of a model


class Projection(nn.Module):
    """A fixed 1×1 convolution, which holds no parameter."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """A 1×1 convolution with the fixed projection."""
        return functional.conv2d(x, self.weight)


@dataclass(frozen=True)
class Compressed:
    """F̃ = W_c·F after the layer at place `at` (Eq. 1), a GroupNorm, and C′ inputs to what follows.

    W_c is trained like all the rest and clipped with it as one vector. `frozen` fits it to public records instead,
    as the leading directions of their channels, and keeps it.
    """

    width: int  # C′
    at: int | None = None  # the place of that layer in the sequence, from 0; None: before the last that widens
    frozen: bool = False
    seed: int = 0  # of the new layers' first values

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"compression leaves at least 1 channel, got {self.width}")

    def wrap(self, model: nn.Module, public: Tensor | None = None) -> nn.Module:
        """The compressed network. `public` holds public records as the model takes them, where W_c is fitted."""
        layers = _children(model)
        at = self._place(layers)
        follows = _next_with_weights(layers, at + 1)
        channels = _inputs(layers[follows][1])
        if self.width >= channels:
            raise UserError(f"{channels} channels are not compressed to {self.width}: choose fewer")
        between = [name for name, layer in layers[at + 1 : follows] if any(True for _ in layer.parameters())]
        if between:
            raise UserError(f"compress after {between[-1]!r} or later: a norm of all channels would follow")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            projection = self._projection(
                nn.Sequential(*(layer for _, layer in layers[: at + 1])), channels, public
            )
            narrowed = _narrowed(layers[follows][1], channels, self.width)
        added = [("compress", projection), ("compress_norm", nn.GroupNorm(1, self.width))]
        rest = [(name, narrowed if i == follows else layer) for i, (name, layer) in enumerate(layers) if i > at]
        return nn.Sequential(OrderedDict([*layers[: at + 1], *added, *rest]))

    def line(self, before: int, after: int) -> str:
        """What a report says."""
        how = "fitted to public records" if self.frozen else "trained"
        return f"Compressed to {self.width} channels ({how}): {before:,} parameters became {after:,}."

    def _place(self, layers: list[tuple[str, nn.Module]]) -> int:
        if self.at is not None:
            if not 0 <= self.at < len(layers):
                names = ", ".join(f"{i} {name}" for i, (name, _) in enumerate(layers))
                raise UserError(f"the model has no layer {self.at} to compress after: it has {names}")
            place = self.at
        else:
            widening = [i for i, (_, layer) in enumerate(layers) if _widens(layer)]
            place = widening[-1] - 1 if widening and widening[-1] > 0 else -1
        if place < 0 or all(_first(layer) is None for _, layer in layers[place + 1 :]):
            raise UserError(
                "this model has no convolution that compression could narrow: use a network of several, or "
                'compress public features (features = "discriminant:64")'
            )
        return place

    def _projection(self, before: nn.Module, channels: int, public: Tensor | None) -> nn.Module:
        if not self.frozen:
            return nn.Conv2d(channels, self.width, 1, bias=False)
        if public is None or not len(public):
            raise UserError("a frozen compression is fitted to public records: set a proxy, or train it")
        with torch.no_grad():
            seen = before(public).movedim(1, -1).flatten(0, -2).double()
        seen = seen - seen.mean(0)
        _, vectors = torch.linalg.eigh(seen.T @ seen)
        return Projection(vectors.flip(1)[:, : self.width].T.float()[:, :, None, None].contiguous())


def from_options(
    options: Mapping[str, float | str], seed: int
) -> tuple[Compressed | None, dict[str, float | str]]:
    """The compression that a model's options ask for, and the options of the model itself."""
    own = {key: value for key, value in options.items() if not key.startswith(OPTION)}
    asked = {key: value for key, value in options.items() if key.startswith(OPTION)}
    for key, value in asked.items():
        if key not in (OPTION, AFTER, FROZEN) or isinstance(value, str) or value != int(value):
            raise UserError(
                f"{OPTION} (channels), {AFTER} (a layer's place) and {FROZEN} (0 or 1) are whole numbers, got "
                f"{key} = {value}"
            )
    if not asked:
        return None, own
    if OPTION not in asked:
        raise UserError(f"{' and '.join(asked)} says how to compress, but not to how many channels: set {OPTION}")
    after = asked.get(AFTER)
    place = None if after is None else int(after)
    return Compressed(int(asked[OPTION]), place, bool(asked.get(FROZEN, 0)), seed), own


def _children(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Sequential):
        raise UserError("compression needs a model that is a sequence of layers (nn.Sequential)")
    return list(model.named_children())


def _first(layer: nn.Module) -> Layer | None:
    """The first convolution or linear layer inside."""
    return next((m for m in layer.modules() if isinstance(m, nn.Conv2d | nn.Linear)), None)


def _widens(layer: nn.Module) -> bool:
    first = _first(layer)
    return isinstance(first, nn.Conv2d) and first.out_channels > first.in_channels


def _next_with_weights(layers: list[tuple[str, nn.Module]], start: int) -> int:
    return next(i for i in range(start, len(layers)) if _first(layers[i][1]) is not None)


def _inputs(layer: nn.Module) -> int:
    first = _first(layer)
    if not isinstance(first, nn.Conv2d):
        raise UserError("compression must come before a convolution, not before the head: choose an earlier layer")
    return first.in_channels


def _narrowed(layer: nn.Module, channels: int, width: int) -> nn.Module:
    """The layer with `width` inputs: each convolution in it that reads what the layer itself is given."""
    if isinstance(layer, nn.Conv2d):
        return _narrow(layer, width)
    for name in _readers(layer, channels):
        parent, _, last = name.rpartition(".")
        inner = layer.get_submodule(name)
        assert isinstance(inner, nn.Conv2d)
        setattr(layer.get_submodule(parent), last, _narrow(inner, width))
    return layer


def _readers(layer: nn.Module, channels: int) -> list[str]:
    """Names of the convolutions whose input is the layer's own, found by trying."""
    found: list[str] = []
    blank = torch.zeros(1, channels, 8, 8)
    hooks = [
        inner.register_forward_pre_hook(lambda _, x, name=name: found.append(name) if x[0] is blank else None)
        for name, inner in layer.named_modules()
        if isinstance(inner, nn.Conv2d)
    ]
    try:
        with torch.no_grad():
            layer(blank)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _narrow(conv: nn.Conv2d, width: int) -> nn.Conv2d:
    if conv.groups != 1:
        raise UserError(
            "compression narrows plain convolutions, and the next one has groups: choose another layer"
        )
    return nn.Conv2d(
        width,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        stride=conv.stride,  # type: ignore[arg-type]
        padding=conv.padding,  # type: ignore[arg-type]
        bias=conv.bias is not None,
    )
