"""The values that data come in: records, a dataset, one client's share, and a whole federation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.core.persons import Slot
from modicum.core.records import Field, Fields, each, leaves
from modicum.data.geometry import Geometry
from modicum.errors import UserError, counted

Array = npt.NDArray[Any]


class Peek(StrEnum):
    """What a run tells for free where clients' records decided it; where they are private, what to do instead."""

    CLASSES = "the largest label of private records is private: say how many classes there are (classes = …)"
    PROXY = "a share of private records is not public: name another dataset as proxy"
    VALUES = "the largest whole number in private records is private: say how many there are (values = …)"
    DIVISION = "who holds what would follow from private labels: use natural clients, or the partition iid"


@dataclass(frozen=True, eq=False)
class Arrays:
    """Records and their labels.

    `x` is one array, or several by name (nested mappings of them); the first dimension of each is the record.
    Numbers are kept as float32, whole numbers as int64, truth values as bool. uint8 stands for images of shape
    (N, channels, height, width), which `scaled()` turns into float32 in [0, 1]; whole numbers of your own that are
    no pixels have another type. `y` has one label or several a record: int64 where all are whole numbers (classes
    0, 1, …, tokens), else float32.
    """

    x: Any
    y: Array

    def __post_init__(self) -> None:
        x, y = each(_kept, self.x), np.asarray(self.y)
        rows = {len(leaf) if leaf.ndim else -1 for _, leaf in leaves(x)}
        if y.ndim < 1 or rows != {len(y)}:
            shapes = " and ".join(str(leaf.shape) for _, leaf in leaves(x))
            raise UserError(f"labels must be one number per record, got shapes {shapes} and {y.shape}")
        if y.dtype.kind not in "iubf":
            raise UserError(f"labels must be numbers, got {y.dtype}: number the classes 0, 1, …")
        object.__setattr__(self, "x", x)
        whole = y.dtype.kind != "f" or np.array_equal(y, np.floor(y))
        object.__setattr__(self, "y", y.astype(np.int64 if whole else np.float32))

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        """What is public of them: a log or a notebook shows no record."""
        return f"Arrays({counted(len(self), 'record')})"

    def take(self, indices: Array | slice) -> Arrays:
        """These rows of records and labels."""
        return Arrays(each(lambda leaf: leaf[indices], self.x), self.y[indices])

    def scaled(self) -> Any:
        """What a model is given. Pixels are divided by 255, a public constant: no statistic of the data."""
        return each(lambda leaf: leaf.astype(np.float32) / np.float32(255) if is_pixels(leaf) else leaf, self.x)

    def tensors(self, *, floats: bool = False) -> Any:
        """The same as tensors; with `floats` whole numbers and truth values become float32."""
        import torch

        def tensor(leaf: Array) -> torch.Tensor:
            made = torch.from_numpy(leaf)
            return made.float() if floats and not made.is_floating_point() else made

        return each(tensor, self.scaled())

    @property
    def shape(self) -> Any:
        """The shape of one record: a tuple, or one for each of its arrays by name."""
        return each(lambda leaf: tuple(int(n) for n in leaf.shape[1:]), self.x)

    @property
    def plain(self) -> bool:
        """Whether a record is one array of numbers, as linear models and images want it."""
        return not isinstance(self.x, Mapping) and (is_pixels(self.x) or self.x.dtype.kind == "f")

    @property
    def has_classes(self) -> bool:
        """Whether labels can be classes: one whole number a record."""
        return self.y.ndim == 1 and self.y.dtype.kind == "i"

    def fields(self, values: Mapping[str, int]) -> Fields:
        """What is public of a record; `values` says how many whole numbers each array may hold."""

        def described(name: str, leaf: Array) -> Field:
            shape = tuple(int(n) for n in leaf.shape[1:])
            if leaf.dtype.kind == "i":
                return Field(shape, "int", values.get(name))
            return Field(shape, "bool") if leaf.dtype.kind == "b" else Field(shape)

        found: Fields = _named(described, self.x)
        return found

    @staticmethod
    def empty(like: Arrays) -> Arrays:
        """No records, of the shape and type of others."""
        return like.take(slice(0, 0))

    @staticmethod
    def concatenate(parts: Sequence[Arrays]) -> Arrays:
        """Records of several, one after another."""
        x = each(lambda *leaf: np.concatenate(leaf), *[p.x for p in parts])
        return Arrays(x, np.concatenate([p.y for p in parts]))


def is_pixels(leaf: Array) -> bool:
    """Whether these are images as they are stored, 0 to 255."""
    return leaf.dtype == np.uint8


def largest_values(parts: Iterable[Arrays]) -> dict[str, int]:
    """For each array of whole numbers, one more than the largest in all of these records."""
    found: dict[str, int] = {}
    for part in parts:
        for name, leaf in leaves(part.x):
            if leaf.dtype.kind == "i" and leaf.size:
                found[name] = max(found.get(name, 1), int(leaf.max()) + 1)
    return found


def _kept(leaf: Any) -> Array:
    array = np.asarray(leaf)
    if array.dtype in (np.uint8, np.float32, np.int64, np.bool_):
        return array
    if array.dtype.kind not in "fiu":
        raise UserError(f"records must be numbers, got {array.dtype}: turn text and dates into numbers first")
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)


def _named(function: Any, tree: Any, name: str = "") -> Any:
    if not isinstance(tree, Mapping):
        return function(name, tree)
    return {key: _named(function, inner, f"{name}.{key}" if name else key) for key, inner in tree.items()}


@dataclass(frozen=True)
class MadeBy:
    """A public network whose features stand in place of records."""

    name: str  # ends in a digest of all that decides the features
    line: str  # for reports and certificates: where its weights come from, and under which licence


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset before it is divided among clients."""

    name: str
    train: Arrays
    test: Arrays
    classes: int  # 0 where labels are no classes
    clients: npt.NDArray[np.int64] | None = None  # natural client of each training row, e.g. its hospital
    test_clients: npt.NDArray[np.int64] | None = None  # the same for the test rows, where known
    client_names: tuple[str, ...] = ()
    note: str = ""  # what a table has to say, e.g. "subset: 30,000 of 73,257 training records"
    peeks: tuple[Peek, ...] = ()  # what was taken from these very records instead of being agreed on

    values: Mapping[str, int] = field(default_factory=dict)  # how many whole numbers an array may hold, by name
    labels: tuple[str, ...] = ()  # names of the classes, where labels were text
    persons: Array | None = None  # whose each training record is; never leaves whoever holds the records
    slot: Slot | None = None  # of persons, where records are brought together (`in_persons`)
    made_by: MadeBy | None = None  # what made these features of records; None: nothing did

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
            persons=None if self.persons is None else self.persons[keep],
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


Open = Callable[[int], tuple[Any, Any]]
"""The records of the client of this number: inputs and targets."""


@dataclass(frozen=True, eq=False)
class Population:
    """Clients whom a secret coin asks, each opened when it does.

    All have the same plan, so that the accounts know one name for whoever it is: what is charged to it is charged
    to each of them, drawn or not.
    """

    count: int
    open: Open
    like: Arrays  # no records, of the right shape

    @property
    def everybody(self) -> str:
        """The name that stands for each of them in plans, ledger and certificate."""
        return f"each of {self.count:,} clients"

    def name(self, number: int) -> str:
        """A client's own name, which nothing but its messages bears."""
        return f"client-{number:0{len(str(self.count - 1))}d}"

    def records(self, name: str) -> Arrays:
        """What the client of this name holds."""
        return Arrays(*self.open(int(name.removeprefix("client-"))))


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Data as a federation holds it. The proxy is public, and disjoint from every client's records."""

    dataset: str
    clients: tuple[ClientData, ...]
    test: Arrays  # global; only a simulator can see it
    classes: int  # 0 where labels are no classes
    proxy: Arrays
    proxy_validation: Arrays  # public too, for choosing settings
    proxy_classes: int  # differs from `classes` where the proxy is another dataset
    note: str = ""
    proxy_name: str = ""  # the dataset that the proxy comes from
    made_by: MadeBy | None = None  # the network whose features these are, before any geometry; None: of none
    geometry: Geometry | None = None  # the map that they then went through; None: none
    peeks: tuple[Peek, ...] = ()  # what clients' records decided for everybody to see: for simulations alone
    values: Mapping[str, int] = field(default_factory=dict)  # as in `Dataset`
    labels: tuple[str, ...] = ()
    slot: Slot | None = None  # where the records are persons
    population: Population | None = (
        None  # whose clients are opened one by one; `clients` then is whom it stands for
    )

    def __repr__(self) -> str:
        """What is public of it, in a line."""
        everybody = counted(len(self.clients) if self.population is None else self.population.count, "client")
        return f"FederatedData({self.dataset!r}, {everybody}, {counted(sum(self.sizes), 'record')})"

    @property
    def input_shape(self) -> Any:
        """Shape of one record, or of each of its arrays by name."""
        return self.clients[0].train.shape

    @property
    def inputs(self) -> Fields:
        """What is public of a record: shapes, kinds and ranges of its arrays."""
        own = (part for c in self.clients for part in (c.train, c.validation, c.test))
        return self.clients[0].train.fields({**largest_values((*own, self.test, self.proxy)), **self.values})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all clients, in order."""
        return tuple(c.name for c in self.clients)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Training records of each client, the public n_i."""
        return tuple(len(c.train) for c in self.clients)
