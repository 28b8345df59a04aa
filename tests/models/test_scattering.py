"""The scattering transform against what defines it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from modicum.models import build, fixed_features
from modicum.models.scattering import ANGLES, CHANNELS, Scattering


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_shapes(shape: tuple[int, int, int]) -> None:
    scattering = Scattering(shape)
    maps = scattering.maps(torch.rand(2, *shape))
    assert maps.shape == (2, shape[0], CHANNELS, shape[1] // 4, shape[2] // 4)
    assert scattering(torch.rand(2, *shape)).shape == (2, scattering.size)


def test_flat_images_have_their_level_and_no_wavelet_energy() -> None:
    maps = Scattering((1, 28, 28)).maps(torch.full((1, 1, 28, 28), 0.7))
    torch.testing.assert_close(maps[0, 0, 0], torch.full((7, 7), 0.7), rtol=1e-5, atol=1e-6)
    assert maps[0, 0, 1:].abs().max() < 1e-5


def test_order_zero_is_a_gaussian_average() -> None:
    torch.manual_seed(0)
    x = torch.rand(1, 1, 32, 32)
    distance = torch.arange(-16.0, 17.0)
    window = torch.exp(-(distance**2) / (2 * 1.6**2))
    kernel = torch.outer(window, window) / (2 * math.pi * 1.6**2)
    average = functional.conv2d(x, kernel[None, None], padding=16)[..., ::4, ::4]
    mine = Scattering((1, 32, 32)).maps(x)[:, :, 0]
    # Away from the border, where the transform mirrors the image.
    torch.testing.assert_close(mine[..., 2:6, 2:6], average[..., 2:6, 2:6], rtol=1e-3, atol=1e-3)


def test_first_order_responds_to_the_angle_and_scale_of_a_grating() -> None:
    scattering = Scattering((1, 32, 32))
    right = torch.arange(32.0).expand(32, 32)
    for j, wanted in ((0, 0), (1, 1)):
        for angle_index in (0, ANGLES // 2):
            along = right if angle_index == 0 else right.t()
            grating = torch.cos(along * 0.75 * math.pi / 2**j)[None, None]
            response = scattering.maps(grating)[0, 0, 1 : 1 + 2 * ANGLES, 3:5, 3:5].mean((1, 2)).view(2, ANGLES)
            assert divmod(int(response.argmax()), ANGLES) == (wanted, angle_index)


def test_a_shift_by_the_window_moves_the_maps_by_one_pixel() -> None:
    torch.manual_seed(0)
    x = functional.pad(torch.rand(1, 1, 12, 12), (10,) * 4)
    maps = Scattering((1, 32, 32)).maps(x)
    moved = Scattering((1, 32, 32)).maps(torch.roll(x, 4, -1))
    torch.testing.assert_close(moved[..., 1:-1, 2:-1], maps[..., 1:-1, 1:-2], rtol=1e-2, atol=2e-3)


def test_features_are_computed_once_and_the_head_is_all_that_trains() -> None:
    torch.manual_seed(0)
    model = build("scattering", (1, 28, 28), 10)
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    torch.nn.init.normal_(model.get_parameter("head.weight"))
    parts = fixed_features(model)
    assert parts is not None
    x = torch.rand(3, 1, 28, 28)
    torch.testing.assert_close(parts[1](parts[0](x)), model(x))
    assert fixed_features(build("logistic", (4,), 2)) is None


def test_centring_uses_the_given_images_alone_and_travels_with_the_state() -> None:
    torch.manual_seed(0)
    features = Scattering((1, 28, 28))
    public, x = torch.rand(5, 1, 28, 28), torch.rand(2, 1, 28, 28)
    plain, mean = features(x), features(public).mean(0)
    features.centre_on(public)
    features.centre_on(public)
    torch.testing.assert_close(features(x), plain - mean, rtol=1e-4, atol=1e-5)
    other = Scattering((1, 28, 28))
    other.load_state_dict(features.state_dict())
    torch.testing.assert_close(other(x), features(x))
