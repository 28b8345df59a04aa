"""Readers of the idx format: MNIST, Fashion-MNIST and EMNIST, gzipped or not."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from modicum.data.arrays import Array, Arrays
from modicum.errors import UserError


def read_idx(path: Path) -> Array:
    """An idx file of unsigned bytes: two zero bytes, type 8, the number of axes, their lengths, the values."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}): delete it and fetch it again") from None
    axes = raw[3] if len(raw) >= 4 and raw[:3] == b"\x00\x00\x08" else 0
    start = 4 + 4 * axes
    if axes == 0 or len(raw) < start:
        raise UserError(f"{path} is not an idx file of bytes: delete it and fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=axes, offset=4))
    if len(raw) - start != int(np.prod(shape, dtype=np.int64)):
        raise UserError(f"{path} holds {len(raw) - start} bytes where its header says {shape}: fetch it again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_images(images: Path, labels: Path, *, transposed: bool = False, first_label: int = 0) -> Arrays:
    """Grey images as (N, 1, height, width). EMNIST is published transposed, and its letters count from 1."""
    x, y = read_idx(images), read_idx(labels).astype(np.int64) - first_label
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise UserError(f"{images} and {labels.name} do not fit together: {x.shape} images, {y.shape} labels")
    if transposed:
        x = x.transpose(0, 2, 1)
    return Arrays(np.ascontiguousarray(x[:, None]), y)
