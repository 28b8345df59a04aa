"""Reader of the CIFAR python batches, without letting a pickle run code."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from modicum.data.arrays import Arrays
from modicum.errors import UserError

_HARMLESS = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


class _ArraysOnly(pickle.Unpickler):
    """Knows numpy arrays and plain containers, and refuses every other name a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a CIFAR batch")
        return super().find_class(module, name)


def read_batches(paths: list[Path], label: bytes) -> Arrays:
    """Colour images as (N, 3, 32, 32). `label` is b"labels" for CIFAR-10, b"fine_labels" for CIFAR-100."""
    return Arrays.concatenate([_read_batch(path, label) for path in paths])


def _read_batch(path: Path, label: bytes) -> Arrays:
    try:
        batch = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        x = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32)
        return Arrays(x, np.asarray(batch[label], np.int64))
    except KeyError as error:
        raise UserError(f"{path} is not a CIFAR python batch: it has no {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged or not a CIFAR python batch ({reason}): fetch it again") from None
