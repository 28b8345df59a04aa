"""Wavelet scattering features with a linear head.

Two layers of Morlet wavelets and moduli, averaged over 2^J pixels (Bruna & Mallat 2013; filters as in Andreux et
al. 2020). Nothing is learned before the head, and each example is normalised by itself, so the features are
public processing: they can be computed once for a dataset, and cost no privacy (Tramèr & Boneh 2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.errors import UserError

J = 2
ANGLES = 8
CHANNELS = 1 + J * ANGLES + ANGLES**2 * J * (J - 1) // 2  # 81 maps for each input channel
GROUPS = 27


class Scattering(nn.Module):
    """(B, c, H, W) images → (B, 81·c·H/4·W/4) features; H and W must be multiples of 4.

    `side` averages every map to side × side values: fewer dimensions for the noise to fall on.
    """

    phi: Tensor
    psi: Tensor
    centre: Tensor

    def __init__(self, input_shape: tuple[int, ...], side: int | None = None) -> None:
        super().__init__()
        if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] % 4 or input_shape[1] < 8:
            raise UserError(
                "scattering takes square images (channels, n, n) with n a multiple of 4 and at least 8, got shape "
                f"{input_shape}"
            )
        self.side = side or input_shape[1] // 4
        if not 1 <= self.side <= input_shape[1] // 4:
            raise UserError(
                f"maps of {input_shape[1] // 4} × {input_shape[1] // 4} values cannot have side {side}"
            )
        self.input_shape = input_shape
        self.pad = 2**J
        padded = input_shape[1] + 2 * self.pad
        self.register_buffer("phi", _gaussian(padded), persistent=False)
        self.register_buffer("psi", torch.stack([_bank(padded, j) for j in range(J)]), persistent=False)
        self.register_buffer("centre", torch.zeros(self.size))

    @property
    def size(self) -> int:
        """Features per example."""
        return CHANNELS * self.input_shape[0] * self.side**2

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Scattering coefficients, averaged to a small grid, normalised by groups and centred."""
        maps = functional.adaptive_avg_pool2d(self.maps(x).flatten(1, 2), self.side)
        return functional.group_norm(maps, GROUPS).flatten(1) - self.centre

    @torch.no_grad()
    def centre_on(self, public: Tensor) -> None:
        """Subtract the mean feature of public images from now on; never call this with clients' data.

        What all images have in common otherwise takes up most of a clipped gradient.
        """
        self.centre.zero_()
        self.centre.copy_(torch.cat([self(part) for part in torch.split(public, 256)]).mean(0))

    def maps(self, x: Tensor) -> Tensor:
        """(B, c, 81, H/4, W/4) scattering coefficients: the average, then first and second order."""
        padded = functional.pad(x, (self.pad,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)[:, :, None]
        fine = torch.fft.ifft2(spectrum * self.psi[0]).abs()
        fine_spectrum = torch.fft.fft2(fine)
        coarse = torch.fft.ifft2(_halve(spectrum * self.psi[1])).abs()
        # Only paths to coarser scales carry energy: from each fine angle to each coarse one.
        second = torch.fft.ifft2(_halve(fine_spectrum[:, :, :, None] * self.psi[1])).abs().flatten(2, 3)
        halved = torch.fft.fft2(torch.cat([coarse, second], 2))
        smooth = torch.cat(
            [
                _halve(_halve(torch.cat([spectrum, fine_spectrum], 2) * self.phi)),
                _halve(halved * 4 * _halve(self.phi)),  # the window keeps its unit integral on the coarse grid
            ],
            2,
        )
        margin = self.pad // 4
        maps: Tensor = torch.fft.ifft2(smooth).real
        return maps[..., margin:-margin, margin:-margin]


class ScatteringLinear(nn.Module):
    """`head(features(x))`; only the head has parameters."""

    fixed_features = True

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = Scattering(input_shape)
        self.head = nn.Linear(self.features.size, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the head on the scattering features."""
        logits: Tensor = self.head(self.features(x))
        return logits


def scattering_linear(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The linear head starts at zero: it is convex, and no start is better."""
    model = ScatteringLinear(input_shape, classes)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def _halve(spectrum: Tensor) -> Tensor:
    """The spectrum of every second pixel in both directions: the mean over its aliases."""
    n = spectrum.shape[-1] // 2
    rows = spectrum[..., :n, :] + spectrum[..., n:, :]
    return (rows[..., :n] + rows[..., n:]) / 4


def _wave(side: int, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A periodised plane wave under a Gaussian of unit integral, stretched across the wave by 1/slant."""
    grid = torch.arange(-2 * side, 3 * side, dtype=torch.float64)
    down, right = torch.meshgrid(grid, grid, indexing="ij")
    along = right * math.cos(angle) + down * math.sin(angle)
    across = down * math.cos(angle) - right * math.sin(angle)
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = torch.polar(envelope * slant / (2 * math.pi * sigma**2), frequency * along)
    return wave.view(5, side, 5, side).sum((0, 2))


def _gaussian(side: int) -> Tensor:
    """Spectrum of the averaging window."""
    spectrum: Tensor = torch.fft.fft2(_wave(side, 0.8 * 2 ** (J - 1), 0.0, 0.0, 1.0))
    return spectrum.real.float()


def _bank(side: int, j: int) -> Tensor:
    """Spectra of the Morlet wavelets of scale 2^j: waves less their mean, so that flat regions give nothing."""
    sigma, frequency, slant = 0.8 * 2**j, 0.75 * math.pi / 2**j, 4 / ANGLES
    wavelets = []
    for k in range(ANGLES):
        angle = math.pi * k / ANGLES
        wave = _wave(side, sigma, angle, frequency, slant)
        envelope = _wave(side, sigma, angle, 0.0, slant)
        wavelets.append(torch.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real.float())
    return torch.stack(wavelets)
