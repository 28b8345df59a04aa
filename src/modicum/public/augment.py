"""Random views of images, on whatever device they are, with torch alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Augmentation:
    """How far a random view may stray from the image. Lengths are in half image sizes, angles in degrees."""

    zoom: tuple[float, float] = (1.0, 1.0)  # side of the window that is shown, relative to the image
    shift: float = 0.125
    stretch: float = 0.0
    turn: float = 0.0
    shear: float = 0.0
    mirror: bool = False
    colour: float = 0.0
    grey: float = 0.0
    erase: float = 0.0  # side of a blanked square


LETTER_WEAK = Augmentation(zoom=(0.9, 1.15), shift=0.12, turn=8, shear=0.1)
LETTER_STRONG = Augmentation(zoom=(0.75, 1.35), shift=0.2, stretch=0.15, turn=18, shear=0.25, erase=0.3)
PHOTO_WEAK = Augmentation(zoom=(0.9, 1.05), shift=0.2, mirror=True)
PHOTO_STRONG = Augmentation(
    zoom=(0.45, 1.0), shift=0.1, stretch=0.2, turn=5, mirror=True, colour=0.4, grey=0.15, erase=0.35
)


def random_view(x: Tensor, view: Augmentation, generator: torch.Generator) -> Tensor:
    """One view of each image of a batch with values in [0, 1]."""
    y = _moved(x, view, generator)
    if view.colour and x.shape[1] == 3:
        y = _recoloured(y, view, generator)
    return _erased(y, view.erase, generator) if view.erase else y


def _uniform(n: int, low: float, high: float, like: Tensor, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, device=like.device, generator=generator)


def _moved(x: Tensor, view: Augmentation, generator: torch.Generator) -> Tensor:
    """A random affine window: zoom, stretch, shear, turn, shift and mirror; zoomed in, it stays inside."""
    n = len(x)
    size = _uniform(n, *view.zoom, x, generator)
    stretch = _uniform(n, -view.stretch, view.stretch, x, generator).exp()
    a, d = size * stretch, size / stretch
    if view.mirror:
        a = a * torch.where(_uniform(n, 0, 1, x, generator) < 0.5, -1.0, 1.0)
    turn = _uniform(n, -view.turn, view.turn, x, generator) * (math.pi / 180)
    shear = _uniform(n, -view.shear, view.shear, x, generator)
    cos, sin = turn.cos(), turn.sin()
    room = (1 - size).clamp(min=0) + view.shift
    matrix = torch.stack(
        [
            torch.stack([a * cos, d * (shear * cos - sin), room * _uniform(n, -1, 1, x, generator)], 1),
            torch.stack([a * sin, d * (shear * sin + cos), room * _uniform(n, -1, 1, x, generator)], 1),
        ],
        1,
    )
    grid = functional.affine_grid(matrix, list(x.shape), align_corners=False)
    padding = "reflection" if x.shape[1] == 3 else "zeros"
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)


def _recoloured(x: Tensor, view: Augmentation, generator: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation and a small rotation of the colours; sometimes no colour at all."""
    n, s = len(x), view.colour
    bright, contrast = (_uniform(n, 1 - s, 1 + s, x, generator).view(-1, 1, 1, 1) for _ in range(2))
    saturation = _uniform(n, 1 - s, 1 + s, x, generator)
    saturation = torch.where(_uniform(n, 0, 1, x, generator) < view.grey, 0.0, saturation).view(-1, 1, 1, 1)
    x = x * bright
    middle = x.mean((1, 2, 3), keepdim=True)
    x = (x - middle) * contrast + middle
    grey = x.mean(1, keepdim=True)
    turned = _rotation(0.35 * s * torch.randn(n, 3, device=x.device, generator=generator)) @ (x - grey).flatten(2)
    recoloured: Tensor = (grey + saturation * turned.view_as(x)).clamp(0, 1)
    return recoloured


def _rotation(axis: Tensor) -> Tensor:
    """Rotations about these axes by their lengths (Rodrigues)."""
    angle = axis.norm(dim=1).clamp_min(1e-6)[:, None, None]
    x, y, z = (axis / angle[:, 0]).unbind(1)
    o = torch.zeros_like(x)
    cross = torch.stack([o, -z, y, z, o, -x, -y, x, o], 1).view(-1, 3, 3)
    eye = torch.eye(3, device=axis.device)
    turn: Tensor = eye + angle.sin() * cross + (1 - angle.cos()) * (cross @ cross)
    return turn


def _erased(x: Tensor, side: float, generator: torch.Generator) -> Tensor:
    """Blank a square of random size and place with the image's own mean."""
    n, height, width = len(x), x.shape[2], x.shape[3]
    half = _uniform(n, 0, side, x, generator).view(-1, 1, 1) / 2
    cy, cx = (_uniform(n, 0, 1, x, generator).view(-1, 1, 1) for _ in range(2))
    rows = ((torch.arange(height, device=x.device) + 0.5) / height).view(1, -1, 1)
    columns = ((torch.arange(width, device=x.device) + 0.5) / width).view(1, 1, -1)
    hole = ((rows - cy).abs() < half) & ((columns - cx).abs() < half)
    blanked: Tensor = torch.where(hole[:, None], x.mean((2, 3), keepdim=True), x)
    return blanked
