"""Reader of SVHN's cropped digits, `*_32x32.mat`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from modicum.data.arrays import Arrays
from modicum.errors import UserError


def read_mat(path: Path) -> Arrays:
    """Colour images as (N, 3, 32, 32); the publisher's label 10 is the digit 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=["X", "y"])
        x, y = content["X"], content["y"].reshape(-1).astype(np.int64)
        images = np.ascontiguousarray(x.transpose(3, 2, 0, 1), dtype=np.uint8)
    except Exception as error:  # a damaged .mat can raise nearly anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged or not an SVHN file ({reason}): fetch it again") from None
    return Arrays(images, np.where(y == 10, 0, y))
