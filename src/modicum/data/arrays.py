"""The values that data come in: records, a dataset, one client's share, and a whole federation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.data.geometry import Geometry
from modicum.errors import UserError

Array = npt.NDArray[Any]


class Peek(StrEnum):
    """What a run tells for free where clients' records decided it; where they are private, what to do instead."""

    CLASSES = "the largest label of private records is private: say how many classes there are (classes = …)"
    PROXY = "a share of private records is not public: name another dataset as proxy"
    DIVISION = "who holds what would follow from private labels: use natural clients, or the partition iid"


@dataclass(frozen=True, eq=False)
class Arrays:
    """Records and their labels.

    `x` is float32 features, ready for a model, or uint8 images of shape (N, channels, height, width), which
    `scaled()` turns into float32 in [0, 1]. `y` holds the classes 0, 1, … as int64.
    """

    x: Array
    y: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        x = np.asarray(self.x)
        if x.dtype not in (np.uint8, np.float32):
            x = x.astype(np.float32)
        y = np.asarray(self.y)
        if y.ndim != 1 or len(x) != len(y):
            raise UserError(f"labels must be one number per record, got shapes {x.shape} and {y.shape}")
        if y.dtype.kind not in "iub" and not np.array_equal(y, np.floor(y)):
            raise UserError("labels must be whole numbers 0, 1, …: encode the classes as integers")
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", y.astype(np.int64))

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Array | slice) -> Arrays:
        """These rows of records and labels."""
        return Arrays(self.x[indices], self.y[indices])

    def scaled(self) -> npt.NDArray[np.float32]:
        """Features as float32. Pixels are divided by 255, a public constant: no statistic of the data is used."""
        if self.x.dtype == np.uint8:
            return self.x.astype(np.float32) / np.float32(255)
        features: npt.NDArray[np.float32] = self.x
        return features

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(int(n) for n in self.x.shape[1:])

    @staticmethod
    def empty(like: Arrays) -> Arrays:
        """No records, of the shape and type of others."""
        return like.take(slice(0, 0))

    @staticmethod
    def concatenate(parts: Sequence[Arrays]) -> Arrays:
        """Records of several, one after another."""
        return Arrays(np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts]))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset before it is divided among clients."""

    name: str
    train: Arrays
    test: Arrays
    classes: int
    clients: npt.NDArray[np.int64] | None = None  # natural client of each training row, e.g. its hospital
    test_clients: npt.NDArray[np.int64] | None = None  # the same for the test rows, where known
    client_names: tuple[str, ...] = ()
    note: str = ""  # what a table has to say, e.g. "subset: 30,000 of 73,257 training records"
    peeks: tuple[Peek, ...] = ()  # what was taken from these very records instead of being agreed on

    def only(self, classes: Iterable[int]) -> Dataset:
        """The records of some classes, relabelled 0, 1, … in the order given."""
        wanted = list(classes)
        unknown = [c for c in wanted if not 0 <= c < self.classes]
        if unknown or len(wanted) < 2 or len(set(wanted)) != len(wanted):
            raise UserError(
                f"{self.name}: choose two or more different classes of 0–{self.classes - 1}, got {wanted}"
            )
        code = np.full(self.classes, -1)
        code[wanted] = np.arange(len(wanted))
        keep, keep_test = code[self.train.y] >= 0, code[self.test.y] >= 0
        train, test = self.train.take(keep), self.test.take(keep_test)
        return replace(
            self,
            train=Arrays(train.x, code[train.y]),
            test=Arrays(test.x, code[test.y]),
            classes=len(wanted),
            clients=None if self.clients is None else self.clients[keep],
            test_clients=None if self.test_clients is None else self.test_clients[keep_test],
            note="; ".join(filter(None, [self.note, f"{len(wanted)} of {self.classes} classes"])),
        )


@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client holds."""

    name: str
    train: Arrays
    validation: Arrays
    test: Arrays


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Data as a federation holds it. The proxy is public, and disjoint from every client's records."""

    dataset: str
    clients: tuple[ClientData, ...]
    test: Arrays  # global; only a simulator can see it
    classes: int
    proxy: Arrays
    proxy_validation: Arrays  # public too, for choosing settings
    proxy_classes: int  # differs from `classes` where the proxy is another dataset
    note: str = ""
    proxy_name: str = ""  # the dataset that the proxy comes from
    geometry: Geometry | None = None  # what made these features of records; None: nothing did
    peeks: tuple[Peek, ...] = ()  # what clients' records decided for everybody to see: for simulations alone

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return self.clients[0].train.shape

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all clients, in order."""
        return tuple(c.name for c in self.clients)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Training records of each client, the public n_i."""
        return tuple(len(c.train) for c in self.clients)
