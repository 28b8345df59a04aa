"""The GPU's kernels, without one in Triton's interpreter. Collected where Triton is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import nn

if find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    SHORT = (
        torch.bfloat16 if torch.cuda.is_available() else torch.float16
    )  # the interpreter knows no bf16 products
    SPLIT = [torch.float32, SHORT] if torch.cuda.is_available() else [SHORT]  # nor float32 ones in three of bf16

    LAYERS = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(32, 16, 3, padding=1),
        nn.Conv2d(32, 20, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        nn.Conv2d(5, 7, 3, stride=2, padding=1),
        nn.Conv2d(64, 16, 1),
        nn.Conv2d(16, 32, 5, padding=2),
    ]

    @pytest.mark.parametrize("dtype", [torch.float32, SHORT])
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("layer", LAYERS)
    def test_square_norms_are_those_of_the_gradients(layer: nn.Conv2d, last: bool, dtype: torch.dtype) -> None:
        from modicum.compute.clipping.kernels import launch

        torch.manual_seed(0)
        form = torch.channels_last if last else torch.contiguous_format
        a = torch.randn(3, layer.in_channels, 7, 8)
        a, g = (t.to(dtype) for t in (a, torch.randn_like(layer(a))))
        sides = (layer.stride, layer.padding, layer.dilation)
        truth, gradients = [], []
        for one_a, one_g in zip(a.double(), g.double(), strict=True):
            gradient = torch.ops.aten.convolution_backward(
                one_g[None],
                one_a[None],
                layer.weight.detach().double(),
                None,
                *sides,
                False,
                (0, 0),
                1,
                (False, True, False),
            )[1]
            truth.append(gradient.square().sum())
            gradients.append(gradient.permute(0, 2, 3, 1))
        a, g = (t.to(DEVICE, memory_format=form) for t in (a, g))
        kernel, stride, padding, dilation = ([int(n) for n in side] for side in (layer.kernel_size, *sides))
        found, kept = launch(a, g, kernel, stride, padding, dilation, False)
        torch.testing.assert_close(found.cpu(), torch.stack(truth), rtol=1e-5, atol=0.0)
        torch.testing.assert_close(kept.double().cpu(), torch.stack(gradients), rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("layer", LAYERS)
    def test_patches_are_folded_where_they_were_taken_from(
        layer: nn.Conv2d, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from modicum.compute.client_batched import patches

        torch.manual_seed(0)
        x = torch.randn(6, layer.in_channels, 7, 8, device=DEVICE)
        weight = torch.randn(2, *layer.weight.shape, device=DEVICE)
        convolution = patches.PatchConvolution(layer, x, 2)
        gradient = torch.randn(6, layer.out_channels, convolution.h, convolution.w, device=DEVICE)
        found = {}
        for kernel in (False, True):
            monkeypatch.setattr(patches, "has_kernel", lambda _, kernel=kernel: kernel)
            found[kernel] = convolution.back(weight, gradient)
        torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("dtype", SPLIT)
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize(
        ("batch", "channels", "outs", "size", "stride", "kernel"),
        [
            (5, 64, 64, 4, 1, 3),
            (19, 64, 128, 7, 2, 3),
            (3, 128, 64, 9, 1, 1),
            (40, 64, 64, 2, 1, 3),
            (2, 64, 64, 12, 1, 3),
            (2, 64, 64, 16, 1, 3),
        ],
    )
    def test_weighted_sums_are_those_of_the_gradients(
        batch: int, channels: int, outs: int, size: int, stride: int, kernel: int, last: bool, dtype: torch.dtype
    ) -> None:
        from modicum.compute.clipping.convolution import ConvWeight, Geometry
        from modicum.compute.clipping.kernels import launch_sum

        torch.manual_seed(0)
        form = torch.channels_last if last else torch.contiguous_format
        layer = nn.Conv2d(channels, outs, kernel, stride, kernel // 2)
        a, weights = torch.randn(batch, channels, size, size), torch.rand(batch)
        a, g = (t.to(dtype) for t in (a, torch.randn_like(layer(a))))
        geometry = Geometry((kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, (1, 1), 1)
        truth = ConvWeight(a.double(), g.double(), geometry, layer.weight.shape).weighted_sum(weights.double())
        moves = ([kernel] * 2, [stride] * 2, [kernel // 2] * 2, [1, 1])
        a, g = (t.to(DEVICE, memory_format=form) for t in (a, g))
        found = launch_sum(a, g, weights.to(DEVICE), *moves, 4).permute(0, 3, 1, 2).cpu()
        assert float((found - truth).norm() / truth.norm()) <= (2e-5 if dtype == torch.float32 else 1e-6)
