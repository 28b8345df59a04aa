"""Columns of a table turned into numbers by public constants: ranges, fills and categories that were agreed on.

No record's numbers depend on another record: a mean, a maximum or a list of categories taken from private records
would be a release that nobody paid for.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.data.sequences import TOKENS
from modicum.data.tokens import tokenizer_digest, tokenizer_in
from modicum.errors import UserError


def like(name: str, names: Sequence[str]) -> str:
    """The name that was meant, if one is close. A first line is never repeated: without a head it is a record."""
    found = get_close_matches(name, names, 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


EPOCH = datetime.date(1970, 1, 1).toordinal()
COMMA = re.compile(r"-?[\d.]*,\d+")  # a number as some spreadsheets write it
MISSING = ("", "?", "na", "nan", "null", "none")
NUMBERS = "numbers"  # all columns of numbers together, where texts stand beside them
LONGEST, BYTES = 1 << 16, 257
LARGE = 20.0
"""Inputs beyond this are called unscaled: gradients grow with them, and clipping hides the rest."""

Cells = Sequence[Any]
Table = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one column is read. With a range: clipped to it and brought to [0, 1], or, where a public mean and a
    deviation are given, to so many deviations from the mean; with categories: one column each.

    With edges, such as public quantiles: one column for each stretch between two of them, which rises from 0 to 1
    along it, so that a linear model can bend there.

    A missing cell takes `fill`, in the column's own units; a category that is not listed is all zeros. Dates are
    brought to [0, 1] between the two that are given. A text becomes the numbers of its bytes, 1 to 256, or with a
    tokenizer its tokens and a mask, cut or filled up to the length that is given, as arrays of their own.
    """

    range: tuple[float, float] | None = None
    fill: float | None = None
    categories: tuple[str, ...] | None = None
    dates: tuple[str, str] | None = None  # the first and the last, as 2026-01-31
    mean: float | None = None  # as a look told it, in the column's own units
    deviation: float | None = None
    edges: tuple[float, ...] | None = None  # rising: what python -m modicum.public.columns finds in public records
    text: int | None = None  # its public length in bytes, or in tokens
    tokenizer: str | None = None  # the folder of a fixed and public one
    drop: bool = False

    def __post_init__(self) -> None:
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise UserError(f"a range is two numbers, smallest first, got {list(self.range)}")
        if self.categories is not None and (self.range is not None or self.fill is not None):
            raise UserError("a column has categories, or a range and a fill: not both")
        if self.categories is not None and len({*self.categories}) != len(self.categories):
            raise UserError(f"categories must differ, got {list(self.categories)}")
        given = [x for x in (self.range, self.edges, self.categories, self.dates, self.text) if x is not None]
        if len(given) > 1:
            raise UserError("a column has one of range, edges, categories, dates and text")
        if self.edges is not None and not _rising(self.edges):
            raise UserError(f"edges are two or more finite numbers, each above the last, got {list(self.edges)}")
        if (self.mean is None) != (self.deviation is None) or (self.mean is not None and self.range is None):
            raise UserError("a mean and a deviation go together, with a range that values are cut to")
        if self.deviation is not None and not 0 < self.deviation < math.inf:
            raise UserError(f"a deviation is positive and finite, got {self.deviation}")
        if self.fill is not None and not isinstance(self.fill, int | float):
            raise UserError(f"a fill is a number (of dates: days since 1970), got {self.fill!r}")
        if self.drop and (given or self.fill is not None):
            raise UserError("a column that is dropped has no range, fill or categories")
        if self.dates is not None and not _day(self.dates[0]) < _day(self.dates[1]):
            raise UserError(
                f'dates are two, the first one first, e.g. ["2000-01-01", "2030-01-01"], got {list(self.dates)}'
            )
        if self.text is not None and not 1 <= self.text <= LONGEST:
            raise UserError(f"the length of a text lies between 1 and {LONGEST}, got {self.text}")
        if self.tokenizer is not None and self.text is None:
            raise UserError("a tokenizer is for texts: say their length in tokens, e.g. text = 128")

    @property
    def values(self) -> dict[str, int]:
        """How many different whole numbers there are in each array that a text becomes."""
        if self.text is None:
            return {}
        return {"": BYTES} if self.tokenizer is None else {TOKENS: tokenizer_in(self.tokenizer).values}

    @property
    def agreed(self) -> Column:
        """What all parties have alike: of a tokenizer its content, wherever each keeps its own."""
        return self if self.tokenizer is None else replace(self, tokenizer=tokenizer_digest(self.tokenizer))

    def table(self, name: str, cells: Cells, where: str) -> Table:
        """The column as one or more columns of numbers, named in errors by its row."""
        if self.drop:
            return np.empty((len(cells), 0))
        if self.categories is not None:
            return self._one_hot(cells)
        if self.dates is not None:
            first, last = (_day(date) for date in self.dates)
            days = np.array([self._date(name, cell, f"{where}, row {i + 2}") for i, cell in enumerate(cells)])
            scaled: Table = ((np.clip(days, first, last) - first) / (last - first))[:, None]
            return scaled
        values = np.array([self._number(name, cell, f"{where}, row {i + 2}") for i, cell in enumerate(cells)])
        if self.range is not None:
            low, high = self.range
            values = np.clip(values, low, high)
            if self.mean is not None and self.deviation is not None:
                low, high = self.mean, self.mean + self.deviation
            values = (values - low) / (high - low)
        if self.edges is not None:
            edges = np.array(self.edges)
            climbed: Table = np.clip((values[:, None] - edges[:-1]) / np.diff(edges), 0, 1)
            return climbed
        return values[:, None]

    def _one_hot(self, cells: Cells) -> Table:
        assert self.categories is not None
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(map(_text, cells)))}
        rows = np.array([[float(_same(kind, category)) for category in self.categories] for kind in kinds])
        return rows.reshape(-1, len(self.categories))[[kinds[_text(cell)] for cell in cells]]

    def tokens(self, cells: Cells) -> Any:
        """What a tokenizer makes of each text; without one its bytes plus 1, and 0 where it has ended."""
        assert self.text is not None
        if self.tokenizer is not None:
            return tokenizer_in(self.tokenizer).encode([_text(cell) for cell in cells], self.text)
        out = np.zeros((len(cells), self.text), np.int64)
        for row, cell in zip(out, cells, strict=True):
            found = np.frombuffer(_text(cell).encode()[: self.text], np.uint8)
            row[: len(found)] = found.astype(np.int64) + 1
        return out

    def _date(self, name: str, cell: Any, where: str) -> float:
        if not _text(cell) or _text(cell).lower() in MISSING:
            if self.fill is None:
                raise UserError(
                    f"{where}, column {name!r}: the date is missing; leave the row out, or drop the column"
                )
            return self.fill
        try:
            return _day(cell)
        except UserError:
            raise UserError(f"{where}, column {name!r}: {cell!r} is no date; write it as 2026-01-31") from None

    def _number(self, name: str, cell: Any, where: str) -> float:
        text = str(int(cell)) if isinstance(cell, bool) else _text(cell)
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
            raise UserError(f"{where}, column {name!r}: {cell!r} is not a number; {_advice(name, cell)}")
        return value


def as_columns(columns: Mapping[str, Column | Mapping[str, Any]] | None) -> dict[str, Column]:
    """Columns as Python users give them: made, or their options as a file's table [data.columns] has them."""
    found = {}
    for name, how in (columns or {}).items():
        try:
            options = {} if isinstance(how, Column) else {k: _tuple(v) for k, v in how.items()}
            found[name] = how if isinstance(how, Column) else Column(**options)
        except (TypeError, AttributeError):
            known = ", ".join(Column.__dataclass_fields__)
            raise UserError(
                f"column {name!r} cannot be read by {how!r}: give e.g. {{'range': [0, 120]}}, of {known}"
            ) from None
    return found


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def read_columns(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], columns: Mapping[str, Column], where: str
) -> Any:
    """All feature columns, side by side, in the table's own order; texts as arrays of their own."""
    for name in columns:
        if name not in names:
            raise UserError(f"{where} has no feature column {name!r}{like(name, names)}: correct [data.columns]")
    how = {name: columns.get(name, Column()) for name in names}
    parts = [c.table(n, [row[n] for row in rows], where) for n, c in how.items() if c.text is None]
    texts = {n: c.tokens([row[n] for row in rows]) for n, c in how.items() if c.text is not None}
    numbers = np.concatenate(parts, axis=1) if parts else np.empty((len(rows), 0))
    if not texts:
        return numbers
    if not numbers.shape[1]:
        return next(iter(texts.values())) if len(texts) == 1 else texts
    return {NUMBERS: numbers, **texts}


def values_in(columns: Mapping[str, Column], x: Any) -> dict[str, int]:
    """How many different whole numbers each array of these records may hold, by its name."""
    found = {name: column.values for name, column in columns.items() if column.values}
    alone = len(found) == 1 and not (isinstance(x, Mapping) and set(x) & set(found))  # a text that is the record
    return {
        ".".join(filter(None, ("" if alone else name, inner))): most
        for name, arrays in found.items()
        for inner, most in arrays.items()
    }


def suggest(rows: Sequence[Mapping[str, str]], names: Sequence[str], most: int = 12) -> dict[str, Column]:
    """Ranges, fills and categories as these very records have them, rounded outwards: for the owner's eyes.

    The owner approves public ones, such as what the quantity can be at all.
    """
    return {name: _suggested([_text(row[name]) for row in rows], most) for name in names}


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


def _rising(numbers: Sequence[float]) -> bool:
    return len(numbers) > 1 and all(map(math.isfinite, numbers)) and all(a < b for a, b in pairwise(numbers))


def _text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()


def _day(date: Any) -> float:
    """Days since 1970, with a fraction where there is a time."""
    try:
        found = datetime.datetime.fromisoformat(str(date).strip())
    except ValueError:
        raise UserError(f"{date!r} is no date: write it as 2026-01-31") from None
    return found.toordinal() - EPOCH + (found.hour * 60 + found.minute) / 1440


def _advice(name: str, cell: Any) -> str:
    """What a column of such cells can be given."""
    if isinstance(cell, str) and COMMA.fullmatch(cell.strip()):
        return "write decimals with a point and thousands without a sign"
    if isinstance(cell, list | tuple | np.ndarray):
        return "a cell is one value: give each its own column, or use from_torch for records that are arrays"
    try:
        _day(cell)
    except UserError:
        return (
            f'give the column categories ([data.columns] {name} = {{ categories = ["…"] }}), a length as a text '
            "({ text = 64 }), or drop it ({ drop = true })"
        )
    return f'it looks like a date: [data.columns] {name} = {{ dates = ["2000-01-01", "2030-01-01"] }}'


def _same(cell: Any, category: str) -> bool:
    """Text, or the same number: spreadsheets write 1 as 1.0."""
    text = _text(cell)
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
