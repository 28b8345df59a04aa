"""Where a device rounds the factors of products to ten bits, a contribution still stays within its bound.

The rounding is played on a CPU: gradients of single examples are formed from factors of ten bits. Weighted sums
have to ask for full products; the negative control lets them be rounded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Auto, Clip, Flat, PerLayer, clipped_sum
from modicum.compute.client_batched import model as client_batched
from modicum.compute.client_batched.stacked import StackedEngine
from modicum.compute.clipping import rounding, sums
from modicum.compute.clipping.convolution import FORMED, ConvWeight, Geometry
from modicum.compute.clipping.loop import LoopBackend
from modicum.compute.clipping.pieces import LinearWeight
from modicum.compute.clipping.rules import pieces
from modicum.core.parts import Batch
from tests.compute.helpers import cross_entropy

CLIPS: tuple[Clip, ...] = (Flat(0.3), Auto(0.3), PerLayer({"0": 0.1, "2": 0.2, "4": 0.3}))


def short(values: Tensor) -> Tensor:
    """float32 numbers rounded to ten bits of mantissa."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products as tf32 computes them, unless they are asked for in full."""
    by_groups, by_patches, product = ConvWeight._dense_by_groups, ConvWeight._dense_by_patches, LinearWeight.dense
    monkeypatch.setattr(ConvWeight, "_dense_by_groups", lambda self, a, g: by_groups(self, short(a), short(g)))
    monkeypatch.setattr(ConvWeight, "_dense_by_patches", lambda self, a, g: by_patches(self, short(a), short(g)))
    monkeypatch.setattr(LinearWeight, "dense", lambda self: product(LinearWeight(short(self.a), short(self.g))))
    monkeypatch.setattr(rounding, "product_rounding", lambda *_: rounding.TF32)
    return


def coarse_product(a: Tensor, b: Tensor) -> Tensor:
    return short(a) @ short(b)


def worst(clip: Clip, model: Callable[[int], nn.Module], x: Callable[[int], Tensor], trials: int = 60) -> float:
    """The largest clipped norm of a single example, in units of the bound; larger than 1 breaks a promise."""
    found = []
    for seed in range(trials):
        torch.manual_seed(seed)
        net = model(seed)
        total = clipped_sum(net, cross_entropy, x(seed), torch.randint(3, (1,)), clip).total
        found.append(sum(float(t.double().square().sum()) for t in total.values()) ** 0.5 / clip.bound)
    return max(found)


def network(_: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 3)
    )


def image(_: int) -> Tensor:
    return torch.randn(1, 1, 4, 4)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("clip", CLIPS)
def test_no_contribution_exceeds_its_bound(clip: Clip) -> None:
    assert worst(clip, network, image) <= 1


@pytest.mark.usefixtures("coarse")
def test_with_coarse_sums_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: weighted sums take whatever products the device likes."""
    monkeypatch.setattr(sums, "exact_product", coarse_product)
    assert worst(Flat(0.3), network, image) > 1


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("full", [True, False])
def test_terms_that_cancel(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places whose gradients all but cancel in pairs: what is left is small beside what would be rounded."""
    if not full:
        monkeypatch.setattr(sums, "exact_product", coarse_product)
    found = []
    for seed in range(20):
        torch.manual_seed(seed)
        a, g = torch.randn(2, 20, 2).repeat(1, 2, 1), torch.randn(2, 20, 2).repeat(1, 2, 1)
        a[:, 20:] += 1e-4 * torch.randn(20, 2)
        g[:, 20:] *= -1 + 1e-4 * torch.randn(20, 2)
        piece = LinearWeight(a, g)
        total = piece.weighted_sum(torch.tensor([1.0, 0.0]) / piece.measure_factors().sqrt().float())
        found.append(float(torch.linalg.vector_norm(total.double())))
    assert (max(found) < 1 + 1e-5) is full


def one_example_each(model: nn.Module) -> tuple[Tensor, list[Batch], LoopBackend]:
    loop = LoopBackend(model)
    theta = loop.layout.read(model).expand(12, -1).contiguous()
    batches = [Batch(torch.randn(1, 1, 6, 6), {"y": torch.randint(3, (1,))}) for _ in range(12)]
    return theta, batches, loop


@pytest.mark.parametrize("keep", [0, 1 << 20])
@pytest.mark.parametrize("full", [True, False])
def test_stacked_clients_ask_for_full_products_too(keep: int, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    theta, batches, loop = one_example_each(model)
    monkeypatch.setattr(client_batched, "use_patches", lambda _: True)
    monkeypatch.setattr("modicum.compute.client_batched.patches.KEEP", keep)
    monkeypatch.setattr("modicum.compute.client_batched.client_sums.product_rounding", lambda *_: rounding.TF32)
    if not full:
        monkeypatch.setattr(sums, "exact_product", coarse_product)
    total, _ = StackedEngine(model, loop).clipped_sums(
        theta, batches, lambda o, t: cross_entropy(o, t["y"]), [Flat(1e-3)] * 12
    )
    largest = float(torch.linalg.vector_norm(total.double(), dim=1).max())
    assert (largest <= 1e-3) is full


def halves(t: Tensor) -> tuple[Tensor, Tensor]:
    """A number's first eight bits, and the next eight."""
    high = t.bfloat16().float()
    return high.double(), (t - high).bfloat16().double()


@pytest.mark.parametrize("products", [3, 1])
def test_three_products_of_halves_are_off_by_what_is_charged(products: int) -> None:
    """What a GPU's kernel leaves out of a product, for numbers of all sizes; with one product it is far more."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (8 * torch.rand(2, 200_000, generator=generator) - 4)
    a, g = torch.randn(2, 200_000, generator=generator) * sizes
    (a_high, a_low), (g_high, g_low) = halves(a), halves(g)
    found = a_high * g_high + (a_high * g_low + a_low * g_high if products == 3 else 0.0)
    off = ((found - a.double() * g.double()).abs() / (a.double() * g.double()).abs()).max()
    assert (float(off) <= FORMED) is (products == 3)


def rounded_and_widened(values: Tensor) -> Tensor:
    return rounding.widened(values.bfloat16(), torch.float32)


@pytest.mark.heavy
@pytest.mark.parametrize("kept", [True, False])
def test_a_compiler_does_not_leave_out_the_rounding_to_bf16(kept: bool) -> None:
    """Norms and sums take bf16 numbers. A compiler undoes a plain rounding, maybe for one of them alone."""
    values = torch.linspace(1, 2, 1001)
    work = rounded_and_widened if kept else lambda x: x.bfloat16().float()
    assert torch.equal(torch.compile(work)(values), values.bfloat16().float() if kept else values)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_bf16_numbers_are_computed_in_float32(groups: int) -> None:
    """Bit by bit as of the same numbers in float32, but for bf16's own norms and sums: these would be coarser."""
    torch.manual_seed(0)
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), groups)
    a, g = torch.randn(16, 8, 5, 5).bfloat16(), torch.randn(16, 6, 5, 5).bfloat16()
    shape, weights = torch.Size((6, 8 // groups, 3, 3)), torch.rand(16)
    short, wide = (ConvWeight(*both, geometry, shape) for both in ((a, g), (a.float(), g.float())))
    for one, other in (
        (short.measure()[0], wide.measure()[0]),
        (short.measure()[1].weighted_sum(weights), wide.measure()[1].weighted_sum(weights)),
        (short._gram(), wide._gram()),
        (short.weighted_sum(weights), wide.weighted_sum(weights)),
        (short.dense(), wide.dense()),
    ):
        assert one.dtype != torch.bfloat16
        assert torch.equal(one, other)


@pytest.mark.parametrize("groups", [1, 2])
def test_gram_norms_of_a_convolution_are_those_of_its_gradients(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=groups)
    x = torch.randn(5, 4, 7, 8)
    g = torch.randn_like(layer(x))
    piece = pieces(layer, x, g)["weight"]
    assert isinstance(piece, ConvWeight)
    gradients = piece.dense().double()
    truth = gradients.flatten(1).norm(dim=1)
    found = piece._gram().sqrt()
    assert bool((found >= truth).all())
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=0.0)
    weights = torch.rand(5)
    expected = torch.einsum("b,bocxy->ocxy", weights.double(), gradients)
    torch.testing.assert_close(piece.weighted_sum(weights).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_devices_precision_is_seen_and_put_back() -> None:
    device = torch.device("cpu")
    assert torch.get_float32_matmul_precision() == "highest"  # or another test has left its own behind
    try:
        for precision, expected in (("highest", 0.0), ("high", rounding.TF32), ("medium", rounding.BF16)):
            torch.set_float32_matmul_precision(precision)
            assert rounding.product_rounding(device, torch.float32) == expected
            assert rounding.product_rounding(device, torch.float64) == 0
            with rounding.full_precision(device):
                assert rounding.product_rounding(device, torch.float32) == 0
            assert rounding.product_rounding(device, torch.float32) == expected
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("clip", CLIPS)
def test_passes_in_bf16_leave_the_bound_alone(clip: Clip) -> None:
    """Norms and sums take the same bf16 numbers and are float32 themselves."""
    with torch.autocast("cpu", torch.bfloat16):
        assert worst(clip, network, image, 15) <= 1
