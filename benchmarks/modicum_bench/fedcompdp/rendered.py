"""Public house numbers: digits of fonts and of MNIST, rendered over CIFAR-100 patches, on whatever device.

What decides the label is the digit in the middle; others stand beside it. Nothing here has seen a record of SVHN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

SIDE, FINE = 32, 64  # pictures are drawn twice as fine and then averaged
TALL = 36 / 40  # of a mask's side: its digit


@dataclass(frozen=True)
class Sources:
    """All uint8, on the device that renders."""

    fonts: Tensor  # (fonts, 10, 40, 40)
    written: Tensor  # (records, 40, 40), in the order of their labels
    starts: Tensor  # (11,): where each label's records begin
    patches: Tensor  # (images, 3, 32, 32)

    @classmethod
    def of(cls, fonts: Tensor, written: Tensor, labels: Tensor, patches: Tensor, device: str) -> Sources:
        order = labels.argsort(stable=True)
        starts = torch.searchsorted(labels[order].contiguous(), torch.arange(11))
        return cls(*(t.to(device) for t in (fonts, written[order], starts, patches)))


class Renderer:
    """Draws batches of house numbers; the same seed draws the same ones on the same device."""

    def __init__(self, sources: Sources, seed: int) -> None:
        self.sources, self.device = sources, sources.fonts.device
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def batch(self, n: int) -> tuple[Tensor, Tensor]:
        """(n, 3, 32, 32) pictures in [0, 1] and the digits in their middles."""
        digits = self._integers(10, n, 5)
        ink = self._numbers(digits)
        ground = self._ground(n)
        picture = self._coloured(ground, ink)
        picture = functional.avg_pool2d(self._bars(picture), 2)
        return self._photographed(picture), digits[:, 2]

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, device=self.device, generator=self.generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def _integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self.device, generator=self.generator)

    def _chance(self, probability: float, *shape: int) -> Tensor:
        return self._uniform(0, 1, *shape) < probability

    def _masks(self, digits: Tensor) -> Tensor:
        """(n, 5, 40, 40): the digits of a number have one font; handwritten ones are each their own."""
        s, n = self.sources, len(digits)
        font = self._integers(len(s.fonts), n)[:, None]
        printed = s.fonts[font, digits]
        low, high = s.starts[digits], s.starts[digits + 1]
        row = low + (self._uniform(0, 1, n, 5) * (high - low)).long().clamp(max=len(s.written) - 1)
        by_hand = self._chance(0.12, n)[:, None, None, None]
        return torch.where(by_hand, s.written[row], printed).float() / 255

    def _numbers(self, digits: Tensor) -> Tensor:
        """(n, 1, 64, 64) ink between 0 and 1."""
        n = len(digits)
        masks = self._masks(digits)
        wide = (masks.amax(2) > 0.3).sum(-1) / 40 / TALL  # of each digit, relative to its height
        tall = self._uniform(0.55, 0.95, n) * torch.where(self._chance(0.1, n), 1.2, 1.0)
        stretch = self._uniform(-0.3, 0.3, n).exp()
        half = wide * (tall * stretch)[:, None]  # half widths, in half pictures
        gap = (self._uniform(-0.02, 0.35, n) * tall)[:, None]
        right1 = half[:, 2:3] + half[:, 3:4] + gap
        left1 = -(half[:, 2:3] + half[:, 1:2] + gap)
        place = torch.cat(
            [
                left1 - half[:, 1:2] - half[:, 0:1] - gap,
                left1,
                torch.zeros_like(gap),
                right1,
                right1 + half[:, 3:4] + half[:, 4:5] + gap,
            ],
            1,
        )
        there = self._beside(n)
        turn, shear = 0.09 * self._normal(n), 0.12 * self._normal(n)
        aside, above = 0.07 * self._normal(n), 0.07 * self._normal(n)
        ink = masks.new_zeros(n, 1, FINE, FINE)
        for k in range(5):
            grid = _grid(place[:, k] + aside, above, tall / TALL, tall * stretch / TALL, turn, shear)
            drawn = functional.grid_sample(masks[:, k : k + 1], grid, padding_mode="zeros", align_corners=False)
            ink = torch.maximum(ink, drawn * there[:, k].view(-1, 1, 1, 1))
        return with_strokes(ink, self._uniform(-0.5, 1.0, len(ink)))

    def _beside(self, n: int) -> Tensor:
        """Which of five digits in a row are there: the middle one always, far ones only behind near ones."""
        near = self._chance(0.5, n, 2)
        far = near & self._chance(0.5, n, 2)
        middle = torch.ones(n, 1, device=self.device)
        return torch.cat([far[:, :1], near[:, :1], middle, near[:, 1:], far[:, 1:]], 1).float()

    def _ground(self, n: int) -> Tensor:
        """A colour, mostly greyish, that runs across the picture, and something of a photograph's patch."""
        grey, tint = self._uniform(0.05, 0.95, n, 1), self._normal(n, 3)
        strong = torch.where(self._chance(0.2, n), 0.2, 0.05)[:, None]
        colour = (grey + strong * tint).clamp(0, 1)[:, :, None, None]
        ramp = torch.linspace(-1, 1, FINE, device=self.device)
        slope = 0.08 * self._normal(n, 2)
        run = slope[:, 0, None, None] * ramp[:, None] + slope[:, 1, None, None] * ramp
        patch = self._patches(n)
        share = torch.where(self._chance(0.3, n), self._uniform(0.2, 0.8, n), self._uniform(0, 0.2, n))
        flat = colour + run[:, None]
        return flat + share.view(-1, 1, 1, 1) * (patch - patch.mean((2, 3), keepdim=True))

    def _patches(self, n: int) -> Tensor:
        images = self.sources.patches[self._integers(len(self.sources.patches), n)].float() / 255
        size = self._uniform(0.15, 1.0, n)
        zero = torch.zeros_like(size)
        room = 1 - size
        shift = [room * self._uniform(-1, 1, n) for _ in range(2)]
        rows = [torch.stack([size, zero, shift[0]], 1), torch.stack([zero, size, shift[1]], 1)]
        grid = functional.affine_grid(torch.stack(rows, 1), [n, 3, FINE, FINE], align_corners=False)
        return functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)

    def _coloured(self, ground: Tensor, ink: Tensor) -> Tensor:
        """Ink lighter or darker than the ground; sometimes a shadow or a rim of a third colour."""
        n = len(ground)
        base = ground.mean((2, 3))
        light = base.mean(1)
        up = torch.where(self._chance(0.15, n), self._chance(0.5, n), light < 0.5)
        room = torch.where(up, 1 - light, light)
        contrast = (self._uniform(0.12, 1.0, n) * room).clamp(min=0.07) * torch.where(up, 1.0, -1.0)
        vivid = torch.where(self._chance(0.25, n), 0.3, 0.05)[:, None]
        colour = (base + contrast[:, None] + vivid * self._normal(n, 3))[:, :, None, None]
        third = (base + 0.3 * self._normal(n, 1) + 0.05 * self._normal(n, 3))[:, :, None, None]
        shift = [int(v) for v in self._integers(9, 2) - 4]  # one shadow's direction a batch is enough
        cast = torch.roll(ink, shift, (2, 3)) * self._chance(0.25, n).view(-1, 1, 1, 1)
        rim = functional.max_pool2d(ink, 7, 1, 3) * self._chance(0.1, n).view(-1, 1, 1, 1)
        behind = torch.maximum(cast * self._uniform(0.2, 1, n).view(-1, 1, 1, 1), rim)
        picture = torch.lerp(ground, third.expand_as(ground), behind.expand_as(ground))
        return torch.lerp(picture, colour.expand_as(ground), ink.expand_as(ground))

    def _bars(self, picture: Tensor) -> Tensor:
        """The edge of a plate or a frame: everything beyond a line has another colour."""
        n = len(picture)
        ramp = torch.linspace(-1, 1, FINE, device=self.device)
        for axis in (2, 3):
            for sign in (1.0, -1.0):
                at = self._uniform(0.72, 1.0, n).view(-1, 1, 1, 1)
                line = (sign * ramp).view((1, 1, -1, 1) if axis == 2 else (1, 1, 1, -1))
                beyond = (line > at).float() * self._chance(0.15, n).view(-1, 1, 1, 1)
                colour = self._uniform(0, 1, n, 1, 1, 1) + 0.1 * self._normal(n, 3, 1, 1)
                picture = torch.lerp(picture, colour.expand_as(picture), beyond.expand_as(picture))
        return picture

    def _photographed(self, picture: Tensor) -> Tensor:
        """Blurred, noisy, of some brightness and contrast."""
        n = len(picture)
        strong = self._chance(0.5, n)
        both = torch.where(strong, self._uniform(0.6, 2.2, n), self._uniform(0.1, 0.7, n))
        for axis in (2, 3):
            picture = _blurred(picture, both * self._uniform(0.7, 1.3, n), axis)
        middle = picture.mean((1, 2, 3), keepdim=True)
        contrast = self._uniform(0.5, 1.3, n, 1, 1, 1)
        picture = (picture - middle) * contrast + middle + 0.08 * self._normal(n, 1, 1, 1)
        picture = picture + self._uniform(0, 0.03, n, 1, 1, 1) * self._normal(*picture.shape)
        return picture.clamp(0, 1)


def _grid(x: Tensor, y: Tensor, tall: Tensor, wide: Tensor, turn: Tensor, shear: Tensor) -> Tensor:
    """Where each pixel of a picture looks in a mask whose digit stands at (x, y), in half pictures."""
    cos, sin = turn.cos(), turn.sin()
    # picture = R·S·mask + place, so mask = S⁻¹·R⁻¹·(picture − place); the whole number turns about the middle
    a, b = cos / wide, sin / wide
    c, d = -sin / tall, cos / tall
    a, b = a + shear * c, b + shear * d
    right = x / wide
    rows = [torch.stack([a, b, -right - b * y], 1), torch.stack([c, d, -d * y], 1)]
    return functional.affine_grid(torch.stack(rows, 1), [len(x), 1, FINE, FINE], align_corners=False)


def _blurred(picture: Tensor, sigma: Tensor, axis: int, reach: int = 5) -> Tensor:
    """A Gaussian along one axis, of another width for each picture."""
    taps = torch.arange(-reach, reach + 1, device=picture.device)
    weights = torch.exp(-0.5 * (taps / sigma.clamp(min=0.05)[:, None]) ** 2)
    weights = weights / weights.sum(1, keepdim=True)
    pad = (0, 0, reach, reach) if axis == 2 else (reach, reach, 0, 0)
    padded = functional.pad(picture, pad, mode="replicate")
    out = torch.zeros_like(picture)
    for k in range(2 * reach + 1):
        out += weights[:, k].view(-1, 1, 1, 1) * padded.narrow(axis, k, SIDE)
    return out


def with_strokes(ink: Tensor, by: Tensor) -> Tensor:
    """(B, 1, H, W) strokes thinner or thicker, by −1 to 1 for each picture."""
    thick = functional.max_pool2d(ink, 5, 1, 2)
    thin = -functional.max_pool2d(-ink, 3, 1, 1)
    by = by.view(-1, 1, 1, 1)
    return torch.where(by > 0, torch.lerp(ink, thick, by.clamp(min=0)), torch.lerp(ink, thin, -by.clamp(max=0)))
