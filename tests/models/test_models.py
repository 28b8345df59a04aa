"""Every shipped model is free of batch statistics, fits its classes, and treats each example alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from modicum.compute import Auto, Flat, clipped_sum, reference_clipped_sum
from modicum.errors import UnsoundError, UserError
from modicum.models import CATALOGUE, build, check_model, names
from tests.compute.helpers import assert_same, cross_entropy

ALONE = [name for name in names() if name != "last-stage"]  # that one is made of files: test_last_stage.py
SHAPES = {name: (3, 16, 16) if name.startswith("resnet") else (1, 28, 28) for name in ALONE}
PARAMETERS = {
    "logistic": 7_850,
    "mlp": 50_890,
    "cnn-small": 28_938,
    "lenet": 61_706,
    "lenet-sigmoid": 13_426,
    "cnn8": 436_202,
    "lenet-contrast": 61_706,
    "cnn-contrast": 25_098,
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "scattering": 39_700,
}


@pytest.mark.parametrize("name", ALONE)
def test_shape_size_and_checks(name: str) -> None:
    model = build(name, SHAPES[name], 10, seed=0)
    assert check_model(model, SHAPES[name], 10) is model
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ALONE)
def test_examples_do_not_mix(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, SHAPES[name], 10, seed=0)
    x = torch.rand(3, *SHAPES[name])
    with torch.no_grad():
        together, alone = model(x), torch.cat([model(x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "shape"), [("lenet-contrast", (1, 28, 28)), ("cnn-contrast", (3, 32, 32))])
def test_which_side_of_an_edge_is_bright_does_not_matter(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    edges = build(name, shape, 10, seed=3)[:3]
    x = torch.rand(2, *shape)
    torch.testing.assert_close(edges(x), edges(1 - x), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("error::modicum.compute.SlowClippingWarning")
@pytest.mark.parametrize("name", [name for name in ALONE if name != "resnet34"])
def test_clipped_sum_equals_the_reference(name: str) -> None:
    torch.manual_seed(1)
    model = build(name, SHAPES[name], 10, seed=1)
    x, y = torch.rand(3, *SHAPES[name]), torch.randint(10, (3,))
    for clip in (Flat(0.5), Auto(1.0)):
        truth = reference_clipped_sum(model, cross_entropy, x, y, clip)
        assert_same(clipped_sum(model, cross_entropy, x, y, clip), truth, torch.float32)


def test_a_seed_fixes_the_weights_and_leaves_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    first, second, other = (build("mlp", (4,), 2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[1].weight, other[1].weight)


def test_options() -> None:
    assert build("mlp", (1, 28, 28), 10, hidden=8)[1].out_features == 8
    assert any(isinstance(m, nn.Dropout) for m in build("resnet18", (3, 32, 32), 10, dropout=0.2).modules())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: build("vgg", (1, 28, 28), 10), "unknown model 'vgg'"),
        (lambda: build("mlp", (4,), 0), "at least one output"),
        (lambda: build("mlp", (0,), 2), "positive sizes"),
        (lambda: build("mlp", (4,), 2, depth=3), "has no option 'depth': it takes hidden"),
        (lambda: build("cnn-small", (13,), 2), "takes images"),
        (lambda: build("resnet18", (13,), 2), "takes images"),
        (lambda: build("resnet18", (3, 32, 32), 2, dropout=1.0), "dropout must lie"),
        (lambda: build("scattering", (1, 30, 30), 2), "multiple of 4"),
        (lambda: check_model(nn.Linear(4, 3), (4,), 2), "give the last layer 2 outputs"),
        (lambda: check_model(nn.Linear(4, 3), (5,), 3), "does not take inputs of shape (5,)"),
        (lambda: check_model(nn.LSTM(4, 3), (2, 4), 3), "must return one tensor"),
        (lambda: check_model(nn.Linear(2, 3).requires_grad_(False)), "thaw some"),
        (lambda: check_model(nn.Linear(2, 3).bfloat16()), "call .float()"),
        (lambda: check_model(nn.LazyLinear(3)), "has no numbers yet"),
        (lambda: check_model(nn.Linear(2, 3, device="meta")), "has no numbers yet"),
    ],
)
def test_bad_input_is_one_clear_line(call, says: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.InstanceNorm2d(4, track_running_stats=True)],
)
def test_batch_statistics_are_refused_with_the_reason(layer: nn.Module) -> None:
    with pytest.raises(UnsoundError, match=r"'1' is a .*R9.*GroupNorm"):
        check_model(nn.Sequential(nn.Identity(), layer))


def test_norms_of_single_examples_pass() -> None:
    check_model(nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(3)))


def test_the_catalogue_is_read_without_torch() -> None:
    code = "import sys, modicum.models as m; m.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert all(entry.line and "\n" not in entry.line for entry in CATALOGUE.values())


class Cancels(nn.Module):
    """A product minus itself, added up in another order: nothing but rounding comes out."""

    def __init__(self, mixes: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(784, 3, bias=False)
        self.mixes = mixes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 1e3 * x.flatten(1)
        halves = x[:, ::2] @ self.layer.weight[:, ::2].t() + x[:, 1::2] @ self.layer.weight[:, 1::2].t()
        found: torch.Tensor = self.layer(x) - halves + self.mixes * x.mean(0).mean()
        return found


def test_rounding_is_no_reason_to_refuse_a_model() -> None:
    """In float32 a batch's outputs and its examples' own have no digit in common."""
    model = Cancels().eval()
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    together, alone = model(x), torch.cat([model(x[i : i + 1]) for i in range(3)])
    assert (together - alone).abs().max() > 0.1 * together.abs().max()
    assert check_model(model, (1, 28, 28), 3) is model


@pytest.mark.parametrize("mixes", [1.0, 1e-6])
def test_rounding_does_not_hide_examples_that_are_mixed(mixes: float) -> None:
    with pytest.raises(UnsoundError, match="depends on the rest of its batch"):
        check_model(Cancels(mixes), (1, 28, 28), 3)
