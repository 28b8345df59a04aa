"""Convolutions of many clients by kernels of their own, for GPUs with Triton: no patches, no loop over clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from modicum.clipping.convolution import ConvWeight, Geometry, has_kernel
from modicum.clipping.pieces import Dense, Kept
from modicum.clipping.problem import sum_dtype
from modicum.clipping.rounding import product_rounding


@dataclass(frozen=True)
class ImplicitConvolution:
    """A 2-d convolution of stride 1 of `clients` stacked batches."""

    layer: nn.Conv2d
    clients: int

    @staticmethod
    def fits(layer: Any, x: Tensor) -> bool:
        plain = isinstance(layer, nn.Conv2d) and layer.groups == 1 and not isinstance(layer.padding, str)
        return plain and max(layer.stride) == 1 and has_kernel(x)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._convolve(x, weight, bias, back=False)

    def back(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the input."""
        return self._convolve(gradient, weight, None, back=True)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, back: bool) -> Tensor:
        from modicum.engines.kernels import stacked_convolution

        padding, dilation = _pair(self.layer.padding), _pair(self.layer.dilation)
        return stacked_convolution(x, weight, bias, padding, dilation, is_coarse(x), back=back)

    def pieces(self, x: Tensor, gradient: Tensor) -> dict[str, Any]:
        dtype = sum_dtype(gradient)
        x, gradient = x.to(dtype), gradient.to(dtype)
        found: dict[str, Any] = {"weight": ImplicitWeight(self, x, gradient)}
        if self.layer.bias is not None:
            found["bias"] = Dense(gradient.sum((2, 3)))
        return found


class ImplicitWeight:
    """The per-example weight gradients of such a convolution, never multiplied out."""

    def __init__(self, convolution: ImplicitConvolution, a: Tensor, g: Tensor) -> None:
        layer, self.clients = convolution.layer, convolution.clients
        padding, dilation = _pair(layer.padding), _pair(layer.dilation)
        geometry = Geometry(layer.kernel_size, layer.stride, padding, dilation, 1)
        self.piece = ConvWeight(a, g, geometry, layer.weight.shape)

    def measure(self) -> tuple[Tensor, Kept]:
        return self.piece.measure()[0], self

    def spread(self) -> Tensor:
        return self.piece.spread()

    def client_sums(self, weights: Tensor | None, clients: int) -> Tensor:
        from modicum.engines.kernels import stacked_weight_gradients

        a, g, geo = self.piece.a, self.piece.g, self.piece.geometry
        sides = (_pair(geo.kernel), _pair(geo.padding), _pair(geo.dilation))
        factors = None if weights is None else weights.reshape(-1).to(g.dtype)
        return stacked_weight_gradients(a, g, factors, *sides, clients, is_coarse(a))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.client_sums(weights.view(self.clients, -1), self.clients).sum(0)

    def rows(self, index: Tensor) -> ConvWeight:
        return self.piece.rows(index)

    def dense(self) -> Tensor:
        return self.piece.dense()


def is_coarse(x: Tensor) -> bool:
    return product_rounding(x.device, x.dtype) > 0


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return int(first), int(second)
