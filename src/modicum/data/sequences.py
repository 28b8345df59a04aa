"""Records of PyTorch and Hugging Face datasets as arrays; sequences are brought to one public length.

No length follows from records: one that was padded to the longest of its batch would tell everybody's kernels, and
so the last bits of everybody's gradients, how long the longest record is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modicum.core.records import each, leaves
from modicum.data.arrays import Array
from modicum.errors import UserError

MASK = "mask"
MASKS = ("attention_mask", MASK)
TOKENS = "input_ids"  # as models of transformers call them, and their mask attention_mask
ALONE = "tokens"  # the name of a sequence that was the whole record, once a mask stands beside it
NO_TOKEN = -100


@dataclass(frozen=True)
class Padding:
    """Every sequence has this public length: longer ones are cut, shorter ones filled up and masked."""

    length: int
    fill: float = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"a length is at least 1, got {self.length}")

    def fitted(self, leaf: Array) -> Array:
        """A sequence of this length."""
        cut = leaf[: self.length]
        out = np.full((self.length, *cut.shape[1:]), self.fill, cut.dtype)
        out[: len(cut)] = cut
        return out

    def mask(self, leaf: Array) -> Array:
        """Where the sequence itself is."""
        return np.arange(self.length) < len(leaf)


def record_of(item: Any, padding: Padding | None) -> Any:
    """One record as arrays; with a padding every sequence has its length, and a mask unless it brings one."""
    arrays = each(_array, item)
    if padding is None:
        return arrays
    sequences = {name: leaf for name, leaf in leaves(arrays) if leaf.ndim}
    if not sequences:
        raise UserError("a length is for sequences, and these records have none: leave it out")
    first = next(iter(sequences.values()))
    fitted = each(lambda leaf: padding.fitted(leaf) if leaf.ndim else leaf, arrays)
    if not isinstance(fitted, Mapping):
        return {ALONE: fitted, MASK: padding.mask(first)}
    if any(name in fitted for name in MASKS):
        return {name: leaf.astype(bool) if name in MASKS else leaf for name, leaf in fitted.items()}
    return {**fitted, MASKS[0] if TOKENS in fitted else MASK: padding.mask(first)}


def _array(leaf: Any) -> Array:
    try:
        return np.asarray(leaf)
    except ValueError:
        raise UserError(
            "a record is one array of numbers, or several by name, {'first': …, 'second': …}; some have parts of "
            "unlike shapes"
        ) from None


def stacked(records: Sequence[Any], where: str) -> Any:
    """Records as arrays whose first dimension is the record; refused where they are not alike."""
    first = records[0]
    names = [name for name, _ in leaves(first)]
    for record in records:
        if [name for name, _ in leaves(record)] != names:
            raise UserError(
                f"{where}: records must have the same arrays, {', '.join(names) or 'one'}, each of them"
            )
    for (name, leaf), *others in zip(*(leaves(record) for record in records), strict=True):
        shapes = {leaf.shape, *(other.shape for _, other in others)}
        if len(shapes) > 1:
            raise UserError(f"{where}: records{f' of {name}' if name else ''} {_unlike(shapes)}")
    return each(lambda *parts: np.stack(parts), *records)


def _unlike(shapes: set[tuple[int, ...]]) -> str:
    lengths = sorted({shape[0] for shape in shapes if shape})
    if not lengths:
        return "have different shapes: make them alike"
    return (
        f"have lengths from {lengths[0]} to {lengths[-1]}: say one public length that all are brought to "
        "(length=…); longer ones are cut, shorter ones filled up and masked"
    )


def own_tokens(x: Any) -> Array:
    """What the next token is learned from: the records' own tokens, with no label where the mask says so."""
    if not isinstance(x, Mapping):
        return np.asarray(x)
    found = next((x[name] for name in ("input_ids", ALONE) if name in x), None)
    if found is None:
        raise UserError(
            "records without labels are for next-token, which needs tokens: name them input_ids, or give labels"
        )
    mask = next((x[name] for name in MASKS if name in x), np.ones(found.shape, bool))
    return np.where(mask, found, NO_TOKEN)


def split_item(item: Any, label: str) -> tuple[Any, Any]:
    """(record, label) of whatever a dataset gives: a pair, a table with a column of labels, or a record alone."""
    if isinstance(item, Mapping):
        if label in item:
            return {name: value for name, value in item.items() if name != label}, item[label]
        return dict(item), None
    pair = isinstance(item, tuple) or (isinstance(item, list) and bool(item) and not np.isscalar(item[0]))
    if pair and len(item) == 2:
        return item[0], item[1]
    if pair and len(item) > 2 and any(np.ndim(part) for part in item):
        raise UserError(
            f"items of a dataset have {len(item)} parts: use (record, label), several arrays of a record by name"
        )
    return (item[0], None) if pair and len(item) == 1 else (item, None)
