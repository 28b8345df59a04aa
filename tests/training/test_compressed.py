"""Compression of networks: parameters by hand, same clipped sums as autograd, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import modicum as mo
from modicum.compute import Flat
from modicum.errors import UserError
from modicum.models import build, check_model
from modicum.training.compressed import Compressed, Projection, from_options
from tests.compute.helpers import check

SHAPE, CLASSES = (3, 16, 16), 5


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_parameters_by_hand() -> None:
    """cnn8 of width 8: the last layer that widens is conv5, 16 → 32 channels."""
    whole = build("cnn8", SHAPE, CLASSES, seed=0, width=8)
    small = Compressed(4).wrap(build("cnn8", SHAPE, CLASSES, seed=0, width=8))
    projection, norm, saved = 4 * 16, 2 * 4, (16 - 4) * 32 * 9
    assert size(small) == size(whole) + projection + norm - saved
    names = [name for name, _ in small.named_children()]
    assert names[names.index("compress") - 1 :][:4] == ["relu4", "compress", "compress_norm", "conv5"]
    check_model(small, SHAPE, CLASSES)


def test_a_resnet_narrows_every_reader_of_its_last_stage() -> None:
    model = Compressed(64).wrap(build("resnet18", (3, 32, 32), CLASSES, seed=0))
    block = dict(model.named_children())["stage4_0"]
    assert (block.conv1.in_channels, block.shortcut[0].in_channels, block.conv2.in_channels) == (64, 64, 512)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, CLASSES)


@pytest.mark.parametrize("frozen", [False, True])
def test_clipped_sums_are_those_of_autograd(frozen: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(6, *SHAPE), torch.randint(CLASSES, (6,))
    model = Compressed(4, frozen=frozen).wrap(build("cnn8", SHAPE, CLASSES, seed=0, width=8), x)
    check(model.double(), x.double(), y, Flat(0.5))


def test_an_identity_leaves_logits_alone() -> None:
    """A projection onto all channels, without its norm, changes nothing."""
    plain = build("cnn-small", SHAPE, CLASSES, seed=0)
    layers = list(plain.named_children())
    layers.insert(3, ("same", Projection(torch.eye(16)[:, :, None, None])))
    x = torch.rand(2, *SHAPE)
    torch.testing.assert_close(nn.Sequential(*(layer for _, layer in layers))(x), plain(x))


def test_a_frozen_projection_keeps_the_public_records_directions() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Identity(), nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(32, 2))
    public = torch.randn(50, 1, 2, 2) * torch.tensor([3.0, 0, 0, 0.1]).view(1, 4, 1, 1)
    model = Compressed(1, at=0, frozen=True).wrap(base, public)
    weight = dict(model.named_children())["compress"].weight.flatten()
    assert abs(weight[0]) > 0.99
    assert "compress.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"compress": 16}, "choose fewer"),
        ({"compress": 99}, "choose fewer"),
        ({"compress": 0}, "at least 1"),
        ({"compress": 2.5}, "whole numbers"),
        ({"compress_after": 1}, "set compress"),
        ({"compress": 4, "compress_after": 99}, "no layer 99"),
        ({"compress": 4, "compress_after": 17}, "before the head"),
        ({"compress": 4, "compress_frozen": 1}, "public records"),
        ({"compres": 4}, "has no option"),
    ],
)
def test_bad_options_get_one_line_before_anything_is_reserved(
    options: dict[str, float], line: str, tmp_path: Path
) -> None:
    federation = mo.Federation.from_dataset("digits", clients=2, budgets=8.0)
    with pytest.raises(UserError, match=line) as error:
        mo.train(
            federation,
            method=mo.methods.DpSgd(),
            model="cnn8",
            model_options={"width": 8, **options},
            rounds=1,
            folder=tmp_path / "run",
        )
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_linear_models_are_sent_to_public_features() -> None:
    with pytest.raises(UserError, match="discriminant"):
        Compressed(4).wrap(build("logistic", SHAPE, CLASSES))


def test_any_method_trains_a_compressed_network_and_the_report_says_so(tmp_path: Path) -> None:
    federation = mo.Federation.from_dataset("digits", clients=2, budgets=8.0)
    run = mo.train(
        federation,
        method=mo.methods.Aqc(steps=1),
        model="cnn8",
        model_options={"width": 8, "compress": 4},
        rounds=1,
        folder=tmp_path / "run",
    )
    assert "parameters became" in run.summary.note
    assert any(name.startswith("compress.") for name in run.parameters)
    assert from_options({"width": 8.0}, 0) == (None, {"width": 8.0})
