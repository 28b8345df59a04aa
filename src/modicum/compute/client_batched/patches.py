"""Convolutions of many clients as products of patches with each client's own weights, for GPUs.

Patches are copied once, channels last, so that a kernel's row is one run of memory; forward pass, weight gradient,
per-example gradients and input gradient are then batched matrix products over all clients. A grouped convolution
with a group per client would do the same work in kernels made for few, wide groups.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute.clipping.convolution import has_kernel
from modicum.compute.clipping.pieces import Dense, Kept, LinearWeight
from modicum.compute.clipping.problem import sum_dtype
from modicum.compute.clipping.sums import only_rows, square_norms, weighted_rows

KEEP = 1 << 15
"""Up to this many numbers of an example's gradient are kept for one parameter, however many examples there are."""


class PatchConvolution:
    """A 2-d convolution of `clients` stacked batches."""

    def __init__(self, layer: nn.Conv2d, x: Tensor, clients: int) -> None:
        self.layer, self.clients, self.shape = layer, clients, x.shape
        (self.down, self.right), (self.high, self.wide) = _pair(layer.stride), _pair(layer.kernel_size)
        self.dilation, (self.top, self.left) = _pair(layer.dilation), _pair(layer.padding)
        nhwc = functional.pad(x.permute(0, 2, 3, 1), (0, 0, self.left, self.left, self.top, self.top)).contiguous()
        self.padded = nhwc.shape
        rows, height, width, channels = nhwc.shape
        self.h = (height - self.dilation[0] * (self.high - 1) - 1) // self.down + 1
        self.w = (width - self.dilation[1] * (self.wide - 1) - 1) // self.right + 1
        line, pixel = width * channels, channels
        view = nhwc.as_strided(
            (rows, self.h, self.w, self.high, self.wide, channels),
            (
                height * line,
                self.down * line,
                self.right * pixel,
                self.dilation[0] * line,
                self.dilation[1] * pixel,
                1,
            ),
        )
        self.patches = view.reshape(clients, -1, self.high * self.wide * channels)

    @staticmethod
    def fits(layer: Any) -> bool:
        """Whether a layer is a convolution that patches can stand for: ungrouped, with padding in numbers."""
        return isinstance(layer, nn.Conv2d) and layer.groups == 1 and not isinstance(layer.padding, str)

    def forward(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Each client's patches times its own weights, as images again."""
        matrix = self._matrix(weight)
        if bias is None:
            flat = torch.bmm(self.patches, matrix)
        else:
            flat = torch.baddbmm(bias[:, None], self.patches, matrix)
        return flat.view(self.shape[0], self.h, self.w, -1).permute(0, 3, 1, 2)

    def back(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the input: each patch's gradient, added where the patch was taken from."""
        columns = torch.bmm(self.outputs(gradient), self._matrix(weight).transpose(1, 2))
        columns = columns.view(self.shape[0], self.h, self.w, self.high, self.wide, -1)
        if has_kernel(columns):
            return self._folded(columns).permute(0, 3, 1, 2)
        total = columns.new_zeros(self.padded)
        for i in range(self.high):
            for j in range(self.wide):
                y, x = i * self.dilation[0], j * self.dilation[1]
                rows = slice(y, y + self.down * (self.h - 1) + 1, self.down)
                places = slice(x, x + self.right * (self.w - 1) + 1, self.right)
                total[:, rows, places] += columns[:, :, :, i, j]
        height, width = self.shape[2:]
        seen = total[:, self.top : self.top + height, self.left : self.left + width]
        return seen.permute(0, 3, 1, 2)

    def _folded(self, columns: Tensor) -> Tensor:
        from modicum.compute.clipping.kernels import folded

        size = (self.shape[2], self.shape[3])
        return folded(columns, size, (self.down, self.right), (self.top, self.left), self.dilation)

    def outputs(self, gradient: Tensor) -> Tensor:
        """Output gradients as (clients, rows · places, channels)."""
        return gradient.permute(0, 2, 3, 1).reshape(self.clients, -1, gradient.shape[1])

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.permute(0, 3, 4, 2, 1).reshape(self.clients, -1, weight.shape[1])

    def as_weight(self, flat: Tensor) -> Tensor:
        """(n, out, height · width · channels) → (n, out, channels, height, width)."""
        return flat.view(*flat.shape[:2], self.high, self.wide, -1).permute(0, 1, 4, 2, 3)


class PatchWeight:
    """The per-example weight gradients of a convolution of patches."""

    def __init__(self, convolution: PatchConvolution, gradient: Tensor) -> None:
        dtype = sum_dtype(gradient)
        self.convolution = convolution
        self.g = convolution.outputs(gradient).to(dtype)
        self.a = convolution.patches.to(dtype)
        self.examples = gradient.shape[0]

    def _flat(self) -> Tensor:
        return self._factors().dense()

    def measure(self) -> tuple[Tensor, Kept]:
        if self.g.shape[2] * self.a.shape[2] <= KEEP:
            kept = PatchGradients(self.convolution, self._flat())
            return square_norms(kept.gradients.flatten(1)), kept
        return self._factors().measure_factors(), self

    def _factors(self) -> LinearWeight:
        return LinearWeight(*(t.view(self.examples, -1, t.shape[2]) for t in (self.a, self.g)))

    def dense(self) -> Tensor:
        return self.convolution.as_weight(self._flat())

    def client_sums(self, weights: Tensor | None, clients: int) -> Tensor:
        """One product a client where all examples count alike; else of weighted factors."""
        if weights is None:
            return self.convolution.as_weight(torch.bmm(self.g.transpose(1, 2), self.a))
        whole = self._factors()
        parts = zip(
            torch.split(whole.a, whole.a.shape[0] // clients),
            torch.split(whole.g, whole.g.shape[0] // clients),
            weights,
            strict=True,
        )
        return self.convolution.as_weight(torch.stack([LinearWeight(a, g).weighted_sum(w) for a, g, w in parts]))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.convolution.as_weight(self._factors().weighted_sum(weights)[None])[0]

    def rows(self, some: slice) -> Dense:
        return Dense(self.dense()[some])

    def only(self, finite: Tensor) -> PatchWeight:
        fine = finite.repeat_interleave(self.a.shape[0] * self.a.shape[1] // self.examples)
        found = copy(self)
        found.a, found.g = (only_rows(t.flatten(0, 1), fine).view(t.shape) for t in (self.a, self.g))
        return found


@dataclass(frozen=True)
class PatchGradients:
    """Gradients that exist for each example, in the order of patches."""

    convolution: PatchConvolution
    gradients: Tensor

    def client_sums(self, weights: Tensor | None, clients: int) -> Tensor:
        """Sums over the rows of each client, as weights of the convolution."""
        flat = self.gradients.view(clients, -1, self.gradients[0].numel())
        total = flat.sum(1) if weights is None else weighted_rows(weights, [flat])
        return self.convolution.as_weight(total.view(clients, *self.gradients.shape[1:]))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.client_sums(weights[None], 1)[0]

    def rows(self, some: slice) -> Dense:
        return Dense(self.convolution.as_weight(self.gradients[some]))

    def only(self, finite: Tensor) -> PatchGradients:
        return PatchGradients(self.convolution, only_rows(self.gradients, finite))


def patch_pieces(convolution: PatchConvolution, gradient: Tensor, bias: bool) -> dict[str, Any]:
    """Per-example gradients of weight and bias, by the names of the layer's parameters."""
    weight = PatchWeight(convolution, gradient)
    if not bias:
        return {"weight": weight}
    by_place = weight.g.view(weight.examples, -1, weight.g.shape[2])
    return {"weight": weight, "bias": Dense(by_place.sum(1))}


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return int(first), int(second)
