"""What an account recognises records by: their contents, laid out as rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.core.records import leaves
from modicum.data.arrays import Arrays

BLOCK = 1 << 14  # records whose bytes are laid out at a time


def blocks(*parts: Arrays) -> Iterator[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]:
    """All records of these parts, some at a time."""
    for part in parts:
        for start in range(0, len(part), BLOCK):
            block = part.take(slice(start, start + BLOCK))
            yield as_table(block)


def as_table(block: Arrays) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Records as rows of numbers, and a whole number each: what makes one record differ from another.

    Of other records than numbers with a class, every byte is a number of the row, labels included.
    """
    if block.plain and block.has_classes:
        return block.scaled(), block.y
    held = [leaf + leaf.dtype.type(0) if leaf.dtype.kind == "f" else leaf for _, leaf in leaves(block.x)]
    rows = [np.ascontiguousarray(part.reshape(len(block), -1)) for part in (*held, block.y)]
    table = np.concatenate([part.view(np.uint8).reshape(len(block), -1) for part in rows], axis=1)
    return table.astype(np.float32), np.zeros(len(block), np.int64)
