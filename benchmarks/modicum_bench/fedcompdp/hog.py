"""Histograms of oriented gradients (Dalal & Triggs 2005): hand-made features, in which nothing was learned."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from modicum.models.features import Extractor

CELL, ANGLES = 4, 9
CHUNK = 2000


class Hog(nn.Module):
    """(n, 3, 32, 32) pixels from 0 to 1 to (n, 7·7·2·2·9): blocks of 2×2 cells of 4×4 pixels, each of length 1."""

    def forward(self, images: Tensor) -> Tensor:
        """The histograms of each image by itself."""
        return torch.from_numpy(hog(images.numpy()))


def hand_made() -> Extractor:
    """Histograms as features that are computed once and kept; the code decides them."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return Extractor(f"hog-{digest}", Hog(), channels=(3,), size=7 * 7 * 4 * ANGLES)


def hog(images: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Histograms of images with pixels from 0 to 1."""
    return np.concatenate([_hog(images[i : i + CHUNK]) for i in range(0, len(images), CHUNK)])


def _hog(images: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    grey = images.mean(1)
    dy, dx = np.gradient(grey, axis=(1, 2))
    size = np.hypot(dx, dy)
    angle = np.mod(np.arctan2(dy, dx), np.pi) / np.pi * ANGLES
    low = np.floor(angle).astype(int)
    share = angle - low
    n, side = len(images), images.shape[2] // CELL
    cells = np.zeros((n, side, side, ANGLES), np.float32)
    for b in range(ANGLES):  # each gradient counts in its two nearest angles
        weight = np.where(low % ANGLES == b, 1 - share, 0) + np.where((low + 1) % ANGLES == b, share, 0)
        cells[..., b] = (weight * size).reshape(n, side, CELL, side, CELL).sum((2, 4))
    parts = [cells[:, i : side - 1 + i, j : side - 1 + j] for i in (0, 1) for j in (0, 1)]
    blocks = np.concatenate(parts, -1)
    blocks /= np.linalg.norm(blocks, axis=-1, keepdims=True) + 0.02
    return blocks.reshape(n, -1)
