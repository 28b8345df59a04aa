"""Per-example weight gradients of convolutions. A 1-d convolution is a 2-d one of height one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from modicum.compute.clipping.pieces import WRITE, Kept, Sliced, gram_square_norms, too_large
from modicum.compute.clipping.problem import sum_dtype
from modicum.compute.clipping.rounding import product_rounding, widened
from modicum.compute.clipping.sums import as_released, longest_run, only_rows, weighted_products, weighted_rows

TILE, PLACES, RUN = 64, 256, 16
"""Of a GPU's kernel for weighted sums: channels come in multiples, places at most, examples in float32 at most."""

FORMED = 3.05 * 2.0**-16
"""What its products may be off by: of numbers in two parts of eight bits each it leaves out the product of the
second parts, and what is beyond them, each 2⁻¹⁶ at most."""


@dataclass(frozen=True)
class Geometry:
    """How a 2-d convolution moves over its input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class ConvWeight:
    """g_i = Σ_t δ_it patch_itᵀ for inputs (B, c, H, W) and output gradients δ (B, p, h, w), or both in bf16.

    A GPU's kernels multiply bf16 numbers as they are; everything else widens them first.
    """

    def __init__(self, inputs: Tensor, outputs: Tensor, geometry: Geometry, shape: torch.Size) -> None:
        if math.prod(geometry.kernel) == 1:
            inputs, geometry = _only_what_is_seen(inputs, outputs, geometry)
        self.a, self.g, self.geometry, self.shape = inputs, outputs, geometry, shape
        self.dtype = sum_dtype(outputs)

    def measure(self) -> tuple[Tensor, Kept]:
        factors = self.a[0].numel() + self.g[0].numel()
        if self._gram_is_cheaper() or too_large(self.shape.numel(), factors, on_gpu=self.a.is_cuda):
            return self._gram(), self
        if self._has_kernel:
            return self._by_kernel()
        return Sliced(self._slices(*self._wide)).measure()

    @property
    def _has_kernel(self) -> bool:
        groups = self.geometry.groups
        return (has_kernel(self.a) and groups == 1) or takes_short(self.g, groups)

    @property
    def _wide(self) -> tuple[Tensor, Tensor]:
        return widened(self.a, self.dtype), widened(self.g, self.dtype)

    @property
    def _moves(self) -> tuple[list[int], list[int], list[int], list[int]]:
        geo = self.geometry
        return list(geo.kernel), list(geo.stride), list(geo.padding), list(geo.dilation)

    def _by_kernel(self) -> tuple[Tensor, Kept]:
        a, g = self.a, self.g
        if not a.stride(1) == g.stride(1) == 1:
            a, g = a.contiguous(), g.contiguous()
        coarse = product_rounding(a.device, self.dtype) > 0
        squares, gradients = conv_square_norms(a, g, *self._moves, coarse)
        return squares, TapGradients(gradients)

    @property
    def _forms_again(self) -> bool:
        """Whether a kernel forms each example's gradient once more for the sum, in products of bf16 numbers."""
        places = math.prod(self.g.shape[2:])
        return (
            self._has_kernel
            and self._formed_off is not None
            and self.a.shape[1] % TILE == self.g.shape[1] % TILE == 0
            and places <= PLACES
        )

    @property
    def _formed_off(self) -> float | None:
        """What products of bf16 numbers may be off by; None where float32 numbers may not be split for them."""
        if self.a.dtype == self.g.dtype == torch.bfloat16:
            return 0.0
        return FORMED if product_rounding(self.a.device, self.dtype) > 0 else None

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self._forms_again:
            run = max(1, min(RUN, longest_run(len(weights), weights.dtype)))
            found: Tensor = conv_weighted_sum(self.a, self.g, weights.contiguous(), *self._moves, run)
            return as_released(found.permute(0, 3, 1, 2), len(weights), weights.dtype)
        a, g = self._wide
        view, batch, geo = self._patches(a), len(a), self.geometry
        view = view.view(batch, geo.groups, -1, *view.shape[2:])
        g = g.reshape(batch, geo.groups, self.shape[0] // geo.groups, -1)

        def inputs(examples: slice, units: slice) -> Tensor:
            some = view[examples, :, units]
            return some.reshape(len(some), geo.groups, -1, g.shape[3])

        return weighted_products(weights, g, inputs, self.shape[1], math.prod(geo.kernel)).view(self.shape)

    def rows(self, some: slice) -> ConvWeight:
        return ConvWeight(self.a[some], self.g[some], self.geometry, self.shape)

    def only(self, finite: Tensor) -> ConvWeight:
        return ConvWeight(only_rows(self.a, finite), only_rows(self.g, finite), self.geometry, self.shape)

    def dense(self) -> Tensor:
        return Sliced(self._slices(*self._wide)).dense()

    def _gram_is_cheaper(self) -> bool:
        """Multiply-adds of each route, small float64 products counted fourfold and the rest as measured.

        A GPU's kernel multiplies five times as fast as exact products of small matrices, and these are then read
        and written by every shift.
        """
        places = math.prod(self.g.shape[2:])
        pixels = math.prod(n + 2 * pad for n, pad in zip(self.a.shape[2:], self.geometry.padding, strict=True))
        size = self.shape.numel()
        taps = math.prod(self.geometry.kernel) * self.geometry.groups
        gram = pixels**2 * self.a.shape[1] + places**2 * (self.g.shape[1] + 10 * taps)
        if self._has_kernel:
            return 5 * (gram + 100 * pixels**2) < places * size
        return 4 * gram + 1.5 * places * size < 1.3 * places * size + WRITE * size

    def _gram(self) -> Tensor:
        """The patches' Gram matrix is the pixels', summed over the kernel's shifts: k² times fewer products."""
        geo, (height, width), (h, w) = self.geometry, self.a.shape[2:], self.g.shape[2:]
        blocks, places = self.a.shape[0] * geo.groups, h * w
        x = widened(self.a, torch.float64).reshape(blocks, -1, height * width).transpose(1, 2)
        g = widened(self.g, torch.float64).reshape(blocks, -1, places).transpose(1, 2)
        by_pixel = (x @ x.transpose(1, 2)).view(blocks, height, width, height, width)
        around = (geo.padding[1], geo.padding[1], geo.padding[0], geo.padding[0])
        by_pixel = functional.pad(by_pixel, (*around, *around)).contiguous()
        width += 2 * geo.padding[1]
        pixels = (height + 2 * geo.padding[0]) * width
        down, right = geo.stride[0] * width, geo.stride[1]
        by_patch = by_pixel.new_zeros(blocks, h, w, h, w)
        for i in range(geo.kernel[0]):
            for j in range(geo.kernel[1]):
                shift = i * geo.dilation[0] * width + j * geo.dilation[1]
                strides = (pixels * pixels, down * pixels, right * pixels, down, right)
                by_patch += by_pixel.as_strided(by_patch.shape, strides, shift * (pixels + 1))
        added = x.shape[2] * math.prod(geo.kernel) + g.shape[2]
        by_patch, by_output = by_patch.view(blocks, places, places), g @ g.transpose(1, 2)
        charge = None
        if self._forms_again:
            assert self._formed_off is not None
            charge = self._formed_off + 3 * places * torch.finfo(self.dtype).eps
        norms = gram_square_norms(by_patch, by_output, added, self.dtype, charge)
        return norms.view(-1, geo.groups).sum(1)

    def _slices(self, a: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        """Gradients in slices whose scratch memory is small: in the cache on CPU, beside activations elsewhere."""
        # On CPU one grouped convolution, a group per example, runs near the speed of the ordinary weight gradient
        # unless its channels are too few to fill a vector; on CUDA it is slow, and patches are a strided view.
        on_cpu, spread = a.device.type == "cpu", math.prod(self.geometry.kernel)
        by_groups = on_cpu and self.shape[1] >= 8 and spread > 1
        route = self._dense_by_groups if by_groups else self._dense_by_patches
        scratch = self.shape.numel() if by_groups else a.shape[1] * spread * math.prod(g.shape[2:])
        step = max(4, (1 << 21 if on_cpu else 1 << 26) // scratch // 4 * 4)  # in multiples that threads can share
        parts = zip(torch.split(a, step), torch.split(g, step), strict=True)
        return tuple(route(part_a, part_g) for part_a, part_g in parts)

    def _dense_by_groups(self, a: Tensor, g: Tensor) -> Tensor:
        batch = a.shape[0]
        side_by_side = self._weight_gradient(
            a.reshape(1, -1, *a.shape[2:]), g.reshape(1, -1, *g.shape[2:]), batch * self.geometry.groups, batch
        )
        return side_by_side.view(batch, *self.shape)

    def _dense_by_patches(self, a: Tensor, g: Tensor) -> Tensor:
        batch, groups = len(a), self.geometry.groups
        places = math.prod(g.shape[2:])
        patches = self._patches(a).reshape(batch * groups, -1, places)
        g = g.reshape(batch * groups, -1, places)
        return (g @ patches.transpose(1, 2)).view(batch, *self.shape)

    def _patches(self, a: Tensor) -> Tensor:
        """A view of the padded inputs, (B, channels, *kernel, h, w)."""
        geo = self.geometry
        padded = functional.pad(a, (geo.padding[1], geo.padding[1], geo.padding[0], geo.padding[0])).contiguous()
        channels, width = padded.shape[1], padded.shape[3]
        plane = padded.shape[2] * width
        return padded.as_strided(
            (len(a), channels, *geo.kernel, *self.g.shape[2:]),
            (
                channels * plane,
                plane,
                geo.dilation[0] * width,
                geo.dilation[1],
                geo.stride[0] * width,
                geo.stride[1],
            ),
        )

    def _weight_gradient(self, a: Tensor, g: Tensor, groups: int, copies: int) -> Tensor:
        geo = self.geometry
        shape = (self.shape[0] * copies, *self.shape[1:])
        weight = g.new_empty(shape)  # only its shape is read
        gradient: Tensor = torch.ops.aten.convolution_backward(
            g, a, weight, None, geo.stride, geo.padding, geo.dilation, False, (0, 0), groups, (False, True, False)
        )[1]
        return gradient


@torch.library.custom_op("modicum::conv_weighted_sum", mutates_args=())
def conv_weighted_sum(
    a: Tensor,
    g: Tensor,
    weights: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    run: int,
) -> Tensor:
    """(p, k, l, c) weighted sum in float64 of the gradients Σ_t δ_t patch_tᵀ, each formed by itself."""
    from modicum.compute.clipping.kernels import launch_sum

    return launch_sum(a, g, weights, kernel, stride, padding, dilation, run)


@conv_weighted_sum.register_fake
def _(a: Tensor, g: Tensor, _weights: Tensor, kernel: list[int], *_rest: object) -> Tensor:
    return a.new_empty(g.shape[1], *kernel, a.shape[1], dtype=torch.float64)


@dataclass(frozen=True)
class TapGradients:
    """Gradients that exist for each example, (B, out, height, width, channels) of the kernel."""

    gradients: Tensor

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = weighted_rows(weights, [self.gradients.flatten(1)])
        return total.view(self.gradients.shape[1:]).permute(0, 3, 1, 2)

    def rows(self, some: slice) -> TapGradients:
        return TapGradients(self.gradients[some])

    def only(self, finite: Tensor) -> TapGradients:
        return TapGradients(only_rows(self.gradients, finite))


def has_kernel(inputs: Tensor) -> bool:
    """Whether norms on this device can be found by a kernel of their own, without gradients or patches."""
    return inputs.is_cuda and inputs.dtype == torch.float32 and find_spec("triton") is not None


def takes_short(outputs: Tensor, groups: int) -> bool:
    """Whether a kernel on this device multiplies a convolution's bf16 numbers as they are, which is exact."""
    return groups == 1 and outputs.is_cuda and outputs.dtype == torch.bfloat16 and find_spec("triton") is not None


@torch.library.custom_op("modicum::conv_square_norms", mutates_args=())
def conv_square_norms(
    a: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    coarse: bool,
) -> tuple[Tensor, Tensor]:
    """(B,) squared norms of the gradients Σ_t δ_t patch_tᵀ, and these; `coarse` allows tf32 or better.

    An operator, so that compilers let it be.
    """
    from modicum.compute.clipping.kernels import launch

    return launch(a, g, kernel, stride, padding, dilation, coarse)


@conv_square_norms.register_fake
def _(a: Tensor, g: Tensor, kernel: list[int], *_rest: object) -> tuple[Tensor, Tensor]:
    gradients = a.new_empty(len(a), g.shape[1], *kernel, a.shape[1], dtype=torch.float32)
    return a.new_empty(len(a), dtype=torch.float64), gradients


def _only_what_is_seen(inputs: Tensor, outputs: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """A 1×1 convolution with strides is one without, on the pixels that it visits."""
    (down, right), (h, w) = geometry.stride, outputs.shape[2:]
    pad = geometry.padding
    padded = functional.pad(inputs, (pad[1], pad[1], pad[0], pad[0])) if any(pad) else inputs
    seen = padded[:, :, : down * h : down, : right * w : right]
    return seen, Geometry((1, 1), (1, 1), (0, 0), (1, 1), geometry.groups)
