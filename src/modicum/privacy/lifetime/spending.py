"""Who has spent what: keyed digests of records, and how much of a lifetime grant each has drawn.

A digest is 64 bits of BLAKE2b under a secret key, so that the file tells nothing without the key. Should two
records collide, they share the larger of their spends: an error on the safe side.
"""

from __future__ import annotations

import hashlib
import struct
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint64]
Spends = npt.NDArray[np.float64]

HEAD = struct.Struct("<QQ?")  # how many records, how many different spends, whether the last is of linked ones


class Identity(StrEnum):
    """What makes two rows of two tables the same record."""

    CONTENTS = "contents"  # equal features and label
    ID = "id"  # an equal entry in a declared column
    CLIENT = "client"  # the account is the client's: whatever it holds is the same unit


def _digests(key: bytes, parts: Iterable[bytes], kind: Identity) -> Digests:
    person = kind.encode()
    found = b"".join(hashlib.blake2b(p, key=key, digest_size=8, person=person).digest() for p in parts)
    return np.unique(np.frombuffer(found, dtype="<u8")).astype(np.uint64)


def by_id(key: bytes, ids: Sequence[str]) -> Digests:
    """A keyed digest for each record, of the identifier that its owner gives."""
    return _digests(key, (plain_id(value).encode() for value in ids), Identity.ID)


def plain_id(id: str) -> str:
    """One text for an id that programs write in several ways: 7, 7.0, 007 and " 7". Two that become one share
    their spend, which is the safe side.
    """
    text = unicodedata.normalize("NFC", id.strip())
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() and abs(number) < 1 << 53 else text


def by_contents(key: bytes, blocks: Iterable[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]) -> Digests:
    """Features and labels, as a model is fed with them; −0 is 0, since nothing can tell the two apart."""
    return _digests(key, _rows(blocks), Identity.CONTENTS)


def _rows(blocks: Iterable[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]]) -> Iterable[bytes]:
    for x, y in blocks:
        features = np.ascontiguousarray(x.reshape(len(x), -1), dtype="<f4") + np.float32(0)
        labels = np.ascontiguousarray(y, dtype="<i8").reshape(-1, 1)
        table = np.hstack([features.view(np.uint8), labels.view(np.uint8)])
        raw, width = table.tobytes(), table.shape[1]
        yield from (raw[i : i + width] for i in range(0, len(raw), width))


def whole_client() -> Digests:
    """The digests of an account that protects its client as one unit: a single one, always the same."""
    return np.zeros(1, dtype=np.uint64)


def fingerprint(key: bytes, table: Digests) -> str:
    """One text for a whole table, whatever the order of its rows; tells nothing without the key."""
    return hashlib.blake2b(np.sort(table).astype("<u8").tobytes(), key=key, digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class Spending:
    """Every record the account has seen: its digest (ascending) and what it has drawn so far.

    By contents alone an edited record looks like one that is gone and one that is new. Whatever was gone when
    something new came is `linked` with it, for good: any of them may be another version of any other, so what one
    of them draws all of them have drawn.
    """

    records: Digests
    spent: Spends  # one value for all that are linked
    linked: npt.NDArray[np.bool_]

    @classmethod
    def nothing(cls) -> Spending:
        """Of an account that nobody has drawn on."""
        return cls(np.empty(0, np.uint64), np.empty(0), np.empty(0, np.bool_))

    def of(self, table: Digests, identity: Identity) -> Spends:
        """What each record of a table has drawn.

        A row that was never seen starts at nothing where an id says who it is. By contents alone it may be a
        known record that was edited, so it starts at the most that any record absent from this table has drawn.
        """
        start = 0.0
        if identity is Identity.CONTENTS:
            start = float(self.spent[self._absent(table)].max(initial=0.0))
        spent = np.full(len(table), start)
        known, at = self._known(table)
        spent[known] = self.spent[at[known]]
        return spent

    def most(self, table: Digests, identity: Identity) -> float:
        """What the most-spent record of a table has drawn."""
        return float(self.of(table, identity).max(initial=0.0))

    def after(self, table: Digests, cost: float, identity: Identity) -> Spending:
        """When each record of the table has drawn the cost, and so has whatever may be one of them."""
        drawn, absent = self.of(table, identity) + cost, self._absent(table)
        known, at = self._known(table)
        linked = np.zeros(len(table), np.bool_)
        linked[known] = self.linked[at[known]]
        others = self.linked[absent]
        if identity is Identity.CONTENTS and absent.any() and not known.all():
            linked[~known], others[:] = True, True
        spent = np.concatenate([self.spent[absent], drawn])
        everywhere = np.concatenate([others, linked])
        if linked.any():
            spent[everywhere] = spent[everywhere].max()
        records = np.concatenate([self.records[absent], table])
        order = np.argsort(records)
        return Spending(records[order], spent[order], everywhere[order])

    def _absent(self, table: Digests) -> npt.NDArray[np.bool_]:
        """Which known records a table lacks."""
        return np.asarray(~np.isin(self.records, table, assume_unique=True))

    def _known(self, table: Digests) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Which records of a table were seen before, and where those stand."""
        if not len(self.records):
            return np.zeros(len(table), np.bool_), np.zeros(len(table), np.intp)
        at = np.minimum(np.searchsorted(self.records, table), len(self.records) - 1)
        return self.records[at] == table, at

    def pack(self) -> bytes:
        """Digests, then one small number for each that says which of few different spends it has."""
        levels, which = np.unique(self.spent[~self.linked], return_inverse=True)
        index = np.full(len(self.records), len(levels))
        index[~self.linked] = which
        levels = np.concatenate([levels, self.spent[self.linked][:1]])
        head = HEAD.pack(len(self.records), len(levels), bool(self.linked.any()))
        parts = (levels.astype("<f8"), self.records.astype("<u8"), index.astype(_index_type(len(levels))))
        return head + b"".join(part.tobytes() for part in parts)

    @classmethod
    def unpack(cls, blob: bytes) -> Spending:
        """Back from `pack`."""
        count, levels, pooled = HEAD.unpack_from(blob)
        spends = np.frombuffer(blob, "<f8", levels, HEAD.size)
        at = HEAD.size + spends.nbytes
        records = np.frombuffer(blob, "<u8", count, at)
        which = np.frombuffer(blob, _index_type(levels), count, at + records.nbytes)
        linked = which == levels - 1 if pooled else np.zeros(count, np.bool_)
        return cls(records.astype(np.uint64), spends[which].astype(np.float64), linked)


def _index_type(levels: int) -> str:
    return "<u1" if levels <= 1 << 8 else "<u2" if levels <= 1 << 16 else "<u4"
