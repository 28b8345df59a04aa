"""How near a reconstruction is to the records, and how near one gets without any message (floors).

Values are clamped to [0, 1]; guesses are matched to records by the smallest total squared error; every figure is
taken for each image and averaged afterwards (a mean of PSNRs is not the PSNR of a mean error).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import conv2d

from modicum.attacks.bounds import largest_rate, least_rate

HIT = 0.01  # mean squared error below which a record counts as found
LEVELS = tuple(10 ** (-k / 4) for k in range(14, 3, -1))  # of the curve of hits: errors from 0.0003 to 0.1
WINDOW, SPREAD, K1, K2 = 11, 1.5, 0.01, 0.03  # of SSIM (Wang et al. 2004)


@dataclass(frozen=True)
class Likeness:
    """One record beside the guess that was matched to it."""

    mse: float
    psnr: float  # dB, peak 1
    ssim: float | None  # None where records are no images


def matched(guess: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """(guesses, records) in pairs. Where a message used only some of the records, each guess has its nearest."""
    apart = torch.cdist(guess.cpu().flatten(1).double(), truth.cpu().flatten(1).double()).square().numpy()
    rows, columns = linear_sum_assignment(apart)
    order = np.argsort(columns)
    return guess[torch.as_tensor(rows[order])], truth[torch.as_tensor(columns[order])]


def likeness(guess: Tensor, truth: Tensor) -> list[Likeness]:
    """Of guesses and records that are matched already, pair by pair."""
    guess, truth = guess.detach().cpu().clamp(0, 1), truth.cpu().clamp(0, 1)
    errors = (guess - truth).flatten(1).square().mean(1).double().tolist()
    image = guess.ndim == 4 and min(guess.shape[-2:]) >= WINDOW
    similar = ssim(guess, truth).tolist() if image else [None] * len(errors)
    return [Likeness(e, psnr(e), s) for e, s in zip(errors, similar, strict=True)]


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error, for values in [0, 1]."""
    return float(-10 * np.log10(max(mse, 1e-12)))


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity of each image: 11×11 Gaussian windows of 1.5 pixels, averaged over windows."""
    line = torch.exp(-((torch.arange(WINDOW) - WINDOW // 2).double() ** 2) / (2 * SPREAD**2))
    window = torch.outer(line, line) / line.sum() ** 2

    def blur(x: Tensor) -> Tensor:
        flat = x.double().reshape(-1, 1, *x.shape[-2:])
        return conv2d(flat, window[None, None]).view(*x.shape[:2], -1)

    a, b = blur(one), blur(other)
    va, vb = blur(one.double() ** 2) - a * a, blur(other.double() ** 2) - b * b
    both = blur(one.double() * other.double()) - a * b
    top = (2 * a * b + K1**2) * (2 * both + K2**2)
    bottom = (a * a + b * b + K1**2) * (va + vb + K2**2)
    return (top / bottom).mean((1, 2))


def hit_rate(mses: list[float], level: float = HIT, confidence: float = 0.95) -> tuple[float, float, float]:
    """(share of records found, and its Clopper–Pearson interval)."""
    hits, total, tail = sum(e < level for e in mses), len(mses), (1 - confidence) / 2
    low, high = float(least_rate(hits, total, tail)), float(largest_rate(hits, total, tail))
    return hits / max(1, total), low, high


def floors(pool: Tensor, truth: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Guesses that use no message: the attacker's mean image, grey, and noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "public mean": pool.cpu().mean(0).expand_as(truth),
        "grey": torch.full_like(truth, 0.5),
        "noise": torch.rand(truth.shape, generator=generator),
    }


def blind_rates(pool: Tensor, levels: Sequence[float], confidence: float = 0.95) -> tuple[float, ...]:
    """κ(η): upper bounds on the share of records that one fixed guess hits within an error η, from public records.

    The best of all pool records and their mean, counted on the pool: more than any guess made beforehand gets.
    """
    rows = pool.cpu().flatten(1).double()
    guesses = torch.cat([rows, rows.mean(0, keepdim=True)])
    apart = torch.cdist(guesses, rows).square() / rows.shape[1]
    most = [int((apart < level).sum(1).max()) for level in levels]
    return tuple(float(largest_rate(count, len(rows), 1 - confidence)) for count in most)
