"""Which layers are known, and how each one's call becomes pieces by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute.clipping.convolution import ConvWeight, Geometry, takes_short
from modicum.compute.clipping.linear import TURNED
from modicum.compute.clipping.pieces import Dense, EmbeddingWeight, Kept, LinearWeight, Piece, RowBias
from modicum.compute.clipping.problem import sum_dtype
from modicum.compute.clipping.sequence import norm_gradients, takes, takes_bf16

Pieces = dict[str, Piece]
Rule = Callable[[Any, Tensor, Tensor], Pieces]


def pieces(layer: nn.Module, inputs: Tensor, gradient: Tensor) -> Pieces:
    """What a call with these inputs and this output gradient gives each of the layer's own parameters."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and takes_short(gradient, layer.groups):
        return RULES[type(layer)](layer, inputs.to(gradient.dtype), gradient)  # as the layer itself took them
    if isinstance(layer, nn.Linear) and takes_bf16(gradient):
        inputs = inputs.to(gradient.dtype)
        if takes(inputs.flatten(1, -2), gradient.flatten(1, -2)):
            return _linear(layer, inputs, gradient)
    dtype = sum_dtype(gradient)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    how = rule(layer)
    assert how is not None
    return how(layer, inputs, gradient.to(dtype))


def known(layer: nn.Module, parameter: str) -> bool:
    """Whether the rule of this layer covers this parameter."""
    if rule(layer) is None or parameter not in ("weight", "bias"):
        return False
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq
    return not (isinstance(layer, nn.Conv1d | nn.Conv2d) and layer.padding_mode != "zeros")


def takes_positions(layer: nn.Module) -> bool:
    """Whether the rule takes further dimensions between the example and its features, and adds over them."""
    return isinstance(layer, nn.Linear | nn.Embedding | nn.LayerNorm | nn.RMSNorm)


def _linear(layer: Any, a: Tensor, g: Tensor) -> Pieces:
    weight = LinearWeight(a, g)
    if layer.bias is None:
        return {"weight": weight}
    one = weight.one_place
    bias = Dense(weight.g.sum(1, dtype=sum_dtype(g))) if one is None else RowBias(one[1], weight)
    return {"weight": weight, "bias": bias}


def _conv2d(layer: Any, a: Tensor, g: Tensor) -> Pieces:
    a, padding = _explicit_padding(layer, a)
    geometry = Geometry(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
    found: Pieces = {"weight": ConvWeight(a, g, geometry, layer.weight.shape)}
    if layer.bias is not None:
        found["bias"] = Dense(g.sum((2, 3), dtype=sum_dtype(g)))
    return found


def _conv1d(layer: Any, a: Tensor, g: Tensor) -> Pieces:
    a, padding = _explicit_padding(layer, a)
    geometry = Geometry(
        (1, *layer.kernel_size), (1, *layer.stride), (0, *padding), (1, *layer.dilation), layer.groups
    )
    out, channels, width = layer.weight.shape
    flat = ConvWeight(a[:, :, None], g[:, :, None], geometry, torch.Size((out, channels, 1, width)))
    found: Pieces = {"weight": _Conv1dWeight(flat, layer.weight.shape)}
    if layer.bias is not None:
        found["bias"] = Dense(g.sum(2, dtype=sum_dtype(g)))
    return found


@dataclass(frozen=True)
class _Reshaped:
    """A one-dimensional convolution's weight, computed in two dimensions."""

    kept: Kept
    shape: torch.Size

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.kept.weighted_sum(weights).view(self.shape)

    def rows(self, some: slice) -> _Reshaped:
        return _Reshaped(self.kept.rows(some), self.shape)

    def only(self, finite: Tensor) -> _Reshaped:
        return _Reshaped(self.kept.only(finite), self.shape)


@dataclass(frozen=True)
class _Conv1dWeight:
    flat: ConvWeight
    shape: torch.Size

    def measure(self) -> tuple[Tensor, Kept]:
        squares, kept = self.flat.measure()
        return squares, _Reshaped(kept, self.shape)

    def dense(self) -> Tensor:
        return self.flat.dense().view(-1, *self.shape)


def _explicit_padding(layer: Any, a: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """'same' padding may be uneven, so it is carried out; numbers are left to the convolution."""
    if layer.padding == "same":
        a = functional.pad(a, layer._reversed_padding_repeated_twice)
    elif layer.padding != "valid":
        return a, layer.padding
    return a, (0,) * len(layer.kernel_size)


def _embedding(layer: Any, a: Tensor, g: Tensor) -> Pieces:
    return {"weight": EmbeddingWeight(a, g, layer.num_embeddings, layer.padding_idx)}


def _layer_norm(layer: Any, a: Tensor, g: Tensor) -> Pieces:
    shape = layer.normalized_shape
    both = norm_gradients(a, g, layer.eps) if len(shape) == 1 else None
    if both is not None:
        return {name: Dense(t) for name, t in zip(("weight", "bias"), both, strict=True)}
    standard = functional.layer_norm(a.to(g.dtype), shape, eps=layer.eps)  # of halves too
    found: Pieces = {"weight": Dense(_over_places(standard.mul_(g), shape))}
    if layer.bias is not None:
        found["bias"] = Dense(_over_places(g, shape))
    return found


def _over_places(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    return g.reshape(g.shape[0], -1, math.prod(shape)).sum(1).view(-1, *shape)


def _rms_norm(layer: Any, a: Tensor, g: Tensor) -> Pieces:
    shape = layer.normalized_shape
    standard = functional.rms_norm(a.to(g.dtype), shape, eps=layer.eps)
    return {"weight": Dense(_over_places(standard.mul_(g), shape))}


def _turned_linear(_layer: Any, a: Tensor, g: Tensor) -> Pieces:
    """GPT-2's: a linear layer whose weight is (inputs, outputs)."""
    return {"weight": LinearWeight(g, a), "bias": Dense(g.reshape(len(g), -1, g.shape[-1]).sum(1))}


def _group_norm(layer: Any, a: Tensor, g: Tensor) -> Pieces:
    standard = functional.group_norm(a, layer.num_groups, eps=layer.eps)
    shape = (*a.shape[:2], -1)
    return {
        "weight": Dense(standard.mul_(g).reshape(shape).sum(2)),
        "bias": Dense(g.reshape(shape).sum(2)),
    }


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _conv1d,
    nn.Conv2d: _conv2d,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.RMSNorm: _rms_norm,
}

BY_NAME: dict[str, Rule] = {TURNED: _turned_linear}
"""Of packages that need not be installed."""


def rule(layer: nn.Module) -> Rule | None:
    """How calls of this layer become pieces; None of a layer without a rule. Subclasses may do anything."""
    kind = type(layer)
    return RULES.get(kind) or BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
