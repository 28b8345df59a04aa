"""Every known layer, over random shapes, equals one example at a time."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.compute import Auto, Clip, Flat, PerLayer, SlowClippingWarning
from modicum.compute.clipping.rules import rule
from tests.compute.helpers import check

CLASSES = 3
EXAMPLES = settings(max_examples=12, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def _no_fallback() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowClippingWarning)
        yield


class Head(nn.Module):
    """A layer under test, a nonlinearity, and a linear head that sees all of its output."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.layer = layer
        size = math.prod(layer(x[:1]).shape[1:])
        self.head = nn.Linear(size, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)).flatten(1))


class InHead(Head):
    """The same with a linear layer in front, so that the layer under test is not the first."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__(layer, x)
        self.first = nn.Linear(x.shape[-1], x.shape[-1], dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu(self.first(x)))


def clips(C: float) -> tuple[Clip, ...]:
    return Flat(C), Auto(C), PerLayer({"layer": C, "head": 2 * C, "first": C / 2})


def try_layer(layer: nn.Module, x: Tensor, seed: int, *, inside: bool = False) -> None:
    torch.manual_seed(seed)
    model = (InHead if inside else Head)(layer, x)
    y = torch.randint(CLASSES, (len(x),))
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype)
        batch = x.to(dtype) if x.is_floating_point() else x
        for clip in clips(0.5):
            check(model, batch, y, clip)


sizes = st.integers(1, 5)
seeds = st.integers(0, 2**31 - 1)


@EXAMPLES
@given(
    seeds, st.integers(1, 4), sizes, sizes, st.lists(st.integers(1, 6), max_size=2), st.booleans(), st.booleans()
)
def test_linear(seed: int, batch: int, d: int, p: int, places: list[int], bias: bool, inside: bool) -> None:
    torch.manual_seed(seed)
    layer = nn.Linear(d, p, bias=bias, dtype=torch.float64)
    try_layer(layer, torch.randn(batch, *places, d, dtype=torch.float64), seed, inside=inside)


@EXAMPLES
@given(
    seeds,
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.tuples(st.sampled_from([1, 2, 8]), sizes),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 2), st.integers(1, 3)),
    st.sampled_from([0, 1, (2, 1), "same", "valid"]),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.booleans(),
)
def test_conv2d(
    seed: int,
    batch: int,
    groups: int,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: object,
    dilation: tuple[int, int],
    bias: bool,
) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv2d(
        channels[0] * groups,
        channels[1] * groups,
        kernel,
        stride=1 if padding == "same" else stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
        dtype=torch.float64,
    )
    try_layer(layer, torch.randn(batch, channels[0] * groups, 6, 7, dtype=torch.float64), seed)


@EXAMPLES
@given(
    seeds,
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([0, 2, "same"]),
    st.integers(1, 2),
)
def test_conv1d(
    seed: int, batch: int, groups: int, kernel: int, stride: int, padding: object, dilation: int
) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv1d(
        2 * groups,
        3 * groups,
        kernel,
        stride=1 if padding == "same" else stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=torch.float64,
    )
    try_layer(layer, torch.randn(batch, 2 * groups, 8, dtype=torch.float64), seed, inside=True)


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "places"),
    [(64, 4, 3, "gram"), (96, 2, 1, "gram"), (1, 8, 5, "patches"), (16, 8, 3, "groups")],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_every_route_of_a_convolution(channels: int, size: int, kernel: int, places: str, groups: int) -> None:
    from modicum.compute.clipping.convolution import ConvWeight

    torch.manual_seed(0)
    inputs = channels * groups
    layer = nn.Conv2d(inputs, inputs, kernel, padding=kernel // 2, groups=groups, dtype=torch.float64)
    x = torch.randn(3, inputs, size, size, dtype=torch.float64)
    used: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for route, name in (("_gram", "gram"), ("_dense_by_patches", "patches"), ("_dense_by_groups", "groups")):
            original = getattr(ConvWeight, route)

            def spy(self, *args, _original=original, _name=name):
                used.append(_name)
                return _original(self, *args)

            patch.setattr(ConvWeight, route, spy)
        try_layer(layer, x, 0)
    assert set(used) == {places}


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "size", "kept"), [(2, 9, True), (24, 9, True), (24, 5, False)])
def test_gradients_of_a_gpus_kernel_are_kept_unless_they_are_large(
    form: torch.memory_format, channels: int, size: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is played by autograd."""
    from modicum.compute.clipping import convolution

    asked: list[int] = []

    def kernel(a, g, size, stride, padding, dilation, _coarse):
        asked.append(len(a))
        weight = torch.zeros(g.shape[1], a.shape[1], *size, dtype=a.dtype, requires_grad=True)
        found = []
        for one, d in zip(a.split(1), g.split(1), strict=True):
            with torch.enable_grad():
                output = nn.functional.conv2d(one, weight, None, stride, padding, dilation)
            found.append(torch.autograd.grad(output, weight, d)[0])
        each = torch.stack(found).permute(0, 1, 3, 4, 2)
        return each.square().sum((1, 2, 3, 4)), each

    monkeypatch.setattr("modicum.compute.clipping.pieces.KEEP", 0)
    monkeypatch.setattr(convolution, "has_kernel", lambda _: True)
    monkeypatch.setattr(convolution, "conv_square_norms", kernel)
    monkeypatch.setattr(convolution.ConvWeight, "_gram_is_cheaper", lambda _: False)
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, channels, 3, stride=2, padding=1, dtype=torch.float64).to(memory_format=form)
    x = torch.randn(3, channels, size, size, dtype=torch.float64).to(memory_format=form)
    try_layer(layer, x, 0)
    assert bool(asked) is kept


@EXAMPLES
@given(seeds, st.integers(1, 4), st.integers(1, 6), st.sampled_from([None, 0, -1]))
def test_embedding(seed: int, batch: int, places: int, padding: int | None) -> None:
    torch.manual_seed(seed)
    layer = nn.Embedding(4, 3, padding_idx=padding, dtype=torch.float64)
    try_layer(layer, torch.randint(4, (batch, places)), seed)


@EXAMPLES
@given(seeds, st.integers(1, 4), st.sampled_from([(1, 3), (2, 2), (3, 1), (6, 1)]), st.lists(sizes, max_size=2))
def test_group_norm(seed: int, batch: int, groups: tuple[int, int], places: list[int]) -> None:
    torch.manual_seed(seed)
    channels = groups[0] * groups[1]
    layer = nn.GroupNorm(groups[0], channels, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    x = torch.randn(batch, channels, *places, 3, dtype=torch.float64) + 1
    try_layer(layer, x, seed, inside=True)


@EXAMPLES
@given(seeds, st.integers(1, 4), st.sampled_from([(5,), (2, 3)]), st.lists(sizes, max_size=2), st.booleans())
def test_layer_norm(seed: int, batch: int, shape: tuple[int, ...], places: list[int], bias: bool) -> None:
    torch.manual_seed(seed)
    layer = nn.LayerNorm(shape, bias=bias, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    try_layer(layer, torch.randn(batch, *places, *shape, dtype=torch.float64), seed, inside=True)


def test_long_sequences_take_the_gram_route_and_wide_ones_are_split() -> None:
    from modicum.compute.clipping import pieces

    torch.manual_seed(0)
    layer = nn.Linear(40, 30, dtype=torch.float64)
    try_layer(layer, torch.randn(3, 2, 40, dtype=torch.float64), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "KEEP", 2000)
        try_layer(nn.Linear(40, 30, dtype=torch.float64), torch.randn(5, 90, 40, dtype=torch.float64), 0)


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.RMSNorm(8)])
def test_gradients_of_a_norm_are_as_precise_as_its_outputs(layer: nn.Module) -> None:
    """Under autocast a GPU's norms take halves and give float32: nothing of that is rounded to halves again."""
    of_layer = rule(layer)
    assert of_layer is not None
    a, g = torch.randn(4, 5, 8).bfloat16(), torch.randn(4, 5, 8)
    found = of_layer(layer, a, g)["weight"].dense()
    truth = of_layer(layer, a.double(), g.double())["weight"].dense()
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), truth, atol=1e-5)
