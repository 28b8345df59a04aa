"""What a server asks of an app, and the only reply that it gets: its own arrays, moved by a noised update.

Names, shapes and types of a reply are those of the question, so that none of them can tell of a record. Arrays
that are no floats go back as they came. Nothing that the app says is ever copied into a reply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from numpy.typing import NDArray

from modicum.errors import UserError

METRICS = "metrics"
NUMPY_CLIENT = "fitins.parameters"  # the record by which apps of the older kind are known
PLANNED, RESERVED, EPSILON = "privacy-planned", "privacy-reserved", "privacy-epsilon"
SPENT = "the budget is spent"


class NotAnswered(UserError):  # noqa: N818
    """Why there is no reply, in words that the server may read."""


@dataclass(frozen=True)
class Question:
    """A message that asks for training, with the server's arrays as numbers."""

    message: Message  # as it came: of it only the metadata are read
    record: str
    arrays: Mapping[str, NDArray[Any]]
    digest: bytes  # of run, kind and content: a question that is repeated word for word has the same

    @classmethod
    def of(cls, message: Message) -> Question:
        """Raises NotAnswered where it asks for anything but training with one record of floats."""
        kind = str(message.metadata.message_type)
        if kind.partition(".")[0] != "train":
            raise NotAnswered(
                f"{kind!r} messages are not answered: a figure about a client's records would leave without noise"
            )
        records = message.content.array_records
        if len(records) != 1:
            raise NotAnswered(f"a train message carries the model in one ArrayRecord, got {len(records)}")
        ((name, record),) = records.items()
        if name == NUMPY_CLIENT:
            raise NotAnswered("the app is a NumPyClient: move it to @app.train() and a strategy of flwr.serverapp")
        try:
            arrays = {key: array.numpy() for key, array in record.items()}
        except (TypeError, ValueError, OSError, EOFError, SyntaxError):
            raise NotAnswered("the model has an array that numpy cannot read: send it as it writes it") from None
        found = cls(message, name, arrays, _digest(message, arrays))
        if not found.size:
            raise NotAnswered("the model has no floating-point number: there is nothing to train in private")
        return found

    @property
    def floats(self) -> dict[str, NDArray[Any]]:
        """The arrays that are trained."""
        return {name: a for name, a in self.arrays.items() if np.issubdtype(a.dtype, np.floating)}

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return sum(a.size for a in self.floats.values())

    def update(self, reply: Message) -> NDArray[np.float64]:
        """How far the app moved the arrays. Private: clip it and add noise.

        Raises whatever it likes where the reply is not what it should be: the caller counts that as no movement.
        """
        (record,) = reply.content.array_records.values()
        moved = []
        names = self._named(list(record.keys()))
        for name, base in self.floats.items():
            after = record[names[name]].numpy()
            if after.shape != base.shape:
                raise ValueError("another shape")
            with np.errstate(all="ignore"):
                moved.append(np.subtract(after, base, dtype=np.float64).ravel())
        return np.concatenate(moved)

    def _named(self, theirs: list[str]) -> dict[str, str]:
        """Arrays by name, or where an app numbers them anew, in their order."""
        ours = list(self.arrays)
        return dict(zip(ours, ours if set(ours) <= set(theirs) else theirs, strict=True))

    def reply(self, update: NDArray[np.float64], metrics: Mapping[str, float]) -> Message:
        """The server's arrays, moved by a *released* update, and figures that are public."""
        moved, start = dict(self.arrays), 0
        with np.errstate(all="ignore"):  # what does not fit the server's type is the server's loss
            for name, base in self.floats.items():
                part = update[start : start + base.size].reshape(base.shape)
                moved[name] = (base.astype(np.float64) + part).astype(base.dtype)
                start += base.size
        content = RecordDict(
            {
                self.record: ArrayRecord({name: Array(np.asarray(a)) for name, a in moved.items()}),
                METRICS: MetricRecord(dict(metrics)),
            }
        )
        return Message(content, reply_to=self.message)


def refused(message: Message, why: str) -> Message:
    """An answer that holds nothing but why there is none; `why` is public."""
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, why), reply_to=message)


def _digest(message: Message, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    configs = {name: sorted(record.items()) for name, record in message.content.config_records.items()}
    digest.update(repr((message.metadata.run_id, message.metadata.message_type, sorted(configs.items()))).encode())
    for name, array in arrays.items():
        digest.update(repr((name, str(array.dtype), array.shape)).encode())
        digest.update(array.tobytes())
    return digest.digest()
