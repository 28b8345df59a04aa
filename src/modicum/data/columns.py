"""Columns of a table turned into numbers by public constants: ranges, fills and categories that were agreed on.

No record's numbers depend on another record: a mean, a maximum or a list of categories taken from private records
would be a release that nobody paid for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modicum.errors import UserError

MISSING = ("", "?", "na", "nan", "null", "none")
LARGE = 20.0
"""Inputs beyond this are called unscaled: gradients grow with them, and clipping hides the rest."""

Cells = Sequence[str]
Table = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one column is read. With a range: clipped to it and brought to [0, 1]; with categories: one column each.

    A missing cell takes `fill`, in the column's own units; a category that is not listed is all zeros.
    """

    range: tuple[float, float] | None = None
    fill: float | None = None
    categories: tuple[str, ...] | None = None
    drop: bool = False

    def __post_init__(self) -> None:
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise UserError(f"a range is two numbers, smallest first, got {list(self.range)}")
        if self.categories is not None and (self.range is not None or self.fill is not None):
            raise UserError("a column has categories, or a range and a fill: not both")
        if self.categories is not None and len({*self.categories}) != len(self.categories):
            raise UserError(f"categories must differ, got {list(self.categories)}")
        if self.drop and (self.range, self.fill, self.categories) != (None, None, None):
            raise UserError("a column that is dropped has no range, fill or categories")

    def table(self, name: str, cells: Cells, where: str) -> Table:
        """The column as one or more columns of numbers, named in errors by its row."""
        if self.drop:
            return np.empty((len(cells), 0))
        if self.categories is not None:
            return self._one_hot(cells)
        values = np.array([self._number(name, cell, f"{where}, row {i + 2}") for i, cell in enumerate(cells)])
        if self.range is not None:
            low, high = self.range
            values = (np.clip(values, low, high) - low) / (high - low)
        return values[:, None]

    def _one_hot(self, cells: Cells) -> Table:
        assert self.categories is not None
        return np.array([[float(_same(cell, category)) for category in self.categories] for cell in cells])

    def _number(self, name: str, cell: str | None, where: str) -> float:
        text = (cell or "").strip()
        if text.lower() in MISSING:
            if self.fill is None:
                raise UserError(
                    f"{where}, column {name!r}: the cell is empty; give the column a fill, e.g. "
                    f"[data.columns] {name} = {{ range = [0, 1], fill = 0.5 }}"
                )
            return self.fill
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(
                f"{where}, column {name!r}: {cell!r} is not a number; give the column categories, or drop it"
            )
        return value


def read_columns(
    rows: Sequence[Mapping[str, str]], names: Sequence[str], columns: Mapping[str, Column], where: str
) -> Table:
    """All feature columns, side by side, in the table's own order."""
    for name in columns:
        if name not in names:
            raise UserError(f"{where} has no feature column {name!r}: it has {', '.join(names)}")
    parts = [columns.get(n, Column()).table(n, [row[n] for row in rows], where) for n in names]
    return np.concatenate(parts, axis=1)


def suggest(rows: Sequence[Mapping[str, str]], names: Sequence[str], most: int = 12) -> dict[str, Column]:
    """Ranges, fills and categories as these very records have them, rounded outwards: for the owner's eyes.

    The owner approves public ones, such as what the quantity can be at all.
    """
    return {name: _suggested([(row[name] or "").strip() for row in rows], most) for name in names}


def _suggested(cells: Cells, most: int) -> Column:
    present = [cell for cell in cells if cell.lower() not in MISSING]
    try:
        numbers = [float(cell) for cell in present]
    except ValueError:
        kinds = sorted({*present})
        return Column(categories=tuple(kinds)) if len(kinds) <= most else Column(drop=True)
    if not numbers:
        return Column(drop=True)
    low, high = _rounded(min(numbers), math.floor), _rounded(max(numbers), math.ceil)
    gaps = len(present) < len(cells)
    high = high if high > low else low + 1
    return Column(range=(low, high), fill=(low + high) / 2 if gaps else None)


def _rounded(value: float, way: Callable[[float], int]) -> float:
    """Down or up to one digit: 237 becomes 200 or 300."""
    unit = 1.0 if value == 0 else 10.0 ** math.floor(math.log10(abs(value)))
    return float(way(value / unit) * unit)


def _same(cell: str | None, category: str) -> bool:
    """Text, or the same number: spreadsheets write 1 as 1.0."""
    text = (cell or "").strip()
    if text == category:
        return True
    try:
        return float(text) == float(category)
    except ValueError:
        return False


def unscaled(x: npt.NDArray[np.generic]) -> str:
    """A warning where numbers are so large that clipping will hide most of them; empty where they are not.

    For whoever holds the records: it depends on them, and is shown nowhere else.
    """
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f" or not x.size:
        return ""
    flat = np.abs(x.reshape(len(x), -1).astype(np.float64)).max(axis=0)
    worst = int(flat.argmax())
    if flat[worst] <= LARGE:
        return ""
    return (
        f"inputs are not scaled: feature {worst} reaches {flat[worst]:.3g}, and clipping will hide the others. "
        "Give columns public ranges under [data.columns], or divide by constants beforehand"
    )
