"""Labels as numbers. Text becomes classes in an order that everybody knows, which the run keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from modicum.data.arrays import Array
from modicum.errors import UserError


def is_text(values: Array) -> bool:
    """Whether labels are names of classes."""
    return values.dtype.kind in "USO"


def names_among(parts: Sequence[Array]) -> tuple[str, ...]:
    """All names in these labels, in the order of the alphabet: for simulations, since records decide it."""
    return tuple(sorted({str(value) for part in parts for value in part.ravel().tolist()}))


def numbered(values: Array, names: Sequence[str], where: str) -> Array:
    """The place of each name in the list; others are refused."""
    code = {name: i for i, name in enumerate(names)}
    unknown = next((v for v in values.ravel().tolist() if str(v) not in code), None)
    if unknown is not None:
        raise UserError(f"{where}: the label {str(unknown)!r} is not one of {', '.join(names)}: list it in labels")
    return np.array([code[str(v)] for v in values.ravel().tolist()], np.int64).reshape(values.shape)


def as_array(cells: Sequence[Any]) -> Array:
    """Cells of a label column: numbers where all are, else text."""
    try:
        return np.array([float(cell) if isinstance(cell, bool) else float(str(cell)) for cell in cells])
    except ValueError:
        return np.array([str(cell).strip() for cell in cells])
