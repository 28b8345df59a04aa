"""Ways to divide records among clients. Each uses every record once and leaves no client empty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from modicum.errors import UserError

Rows = npt.NDArray[np.int64]
Labels = npt.NDArray[Any]

MAX_DRAWS = 1000


class Partition(Protocol):
    """Divides the rows 0 … len(labels)−1 among clients; the same generator state gives the same division."""

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Rows]:
        """The rows of each client, ascending; every row has one owner, every client at least one row."""


@dataclass(frozen=True)
class Iid:
    """Equal shares at random."""

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Rows]:
        check_counts(len(labels), clients)
        return [np.sort(rows) for rows in np.array_split(rng.permutation(len(labels)), clients)]

    def __str__(self) -> str:
        return "iid"


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided among clients in proportions drawn from Dirichlet(α): small α, few classes each.

    Hsu, Qi & Brown 2019, arXiv:1909.06335, in the per-class form of Yurochkin et al. 2019, arXiv:1905.12022.
    Divisions that give a client fewer than `min_records` are drawn again.
    """

    alpha: float = 0.5
    min_records: int = 10

    def __post_init__(self) -> None:
        if not (np.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(f"Dirichlet's alpha must be a positive number, got {self.alpha}")
        if self.min_records < 1:
            raise UserError(f"Dirichlet's min_records must be at least 1, got {self.min_records}")

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Rows]:
        check_counts(len(labels), clients, self.min_records)
        by_class = [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]
        for _ in range(MAX_DRAWS):
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(by_class))
            # A tiny α can underflow to 0/0; such a draw is no division.
            if not np.isfinite(shares).all():
                continue
            counts = np.stack([apportion(len(rows), p) for rows, p in zip(by_class, shares, strict=True)])
            if counts.sum(axis=0).min() >= self.min_records:
                return _deal(by_class, counts)
        raise UserError(
            f"Dirichlet({self.alpha:g}) left one of {clients} clients with fewer than {self.min_records} of "
            f"{len(labels)} records in {MAX_DRAWS} draws: raise alpha, take fewer clients or lower min_records"
        )

    def __str__(self) -> str:
        return f"dirichlet:{self.alpha:g}"


@dataclass(frozen=True)
class Shards:
    """Pathological: each class is cut into shards of one class, and each client holds `per_client` of them.

    McMahan et al. 2017, arXiv:1602.05629, except that no shard straddles two classes, so that a client has at
    most `per_client` classes, and exactly as many where no class needs more shards than there are clients.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise UserError(f"shards per client must be at least 1, got {self.per_client}")

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Rows]:
        total = clients * self.per_client
        check_counts(len(labels), clients, self.per_client)
        values, sizes = np.unique(labels, return_counts=True)
        if total < len(values):
            raise UserError(
                f"{clients} clients with {self.per_client} shards each cannot hold {len(values)} classes: raise "
                "the shards per client or the number of clients"
            )
        cuts = 1 + _apportion_capped(total - len(values), sizes - 1)
        held: list[list[Rows]] = [[] for _ in range(clients)]
        for c in rng.permutation(len(values)):
            rows = rng.permutation(np.flatnonzero(labels == values[c]))
            self._give(np.array_split(rows, cuts[c]), held, rng)
        return [np.sort(np.concatenate(rows)) for rows in held]

    def _give(self, shards: list[Rows], held: list[list[Rows]], rng: np.random.Generator) -> None:
        """One class's shards go to different clients, those with the most room first, ties at random."""
        while shards:
            room = np.array([self.per_client - len(rows) for rows in held])
            order = np.lexsort((rng.random(len(held)), -room))
            for client in order[: len(shards)]:
                if room[client] > 0:
                    held[client].append(shards.pop())

    def __str__(self) -> str:
        return f"shards:{self.per_client}"


@dataclass(frozen=True)
class SizeSkew:
    """Every client has the labels in the same proportions; the largest has `ratio` times the smallest's records.

    Sizes form a geometric series, dealt to clients in random order.
    """

    ratio: float = 10.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.ratio) and self.ratio >= 1):
            raise UserError(f"the size ratio must be at least 1, got {self.ratio}")

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Rows]:
        check_counts(len(labels), clients)
        share = rng.permutation(np.geomspace(1, self.ratio, clients))
        sizes = 1 + _apportion_capped(len(labels) - clients, share)
        # Rows in order of class, owners spread evenly over them: each client gets every class in proportion.
        by_label = rng.permutation(len(labels))
        by_label = by_label[np.argsort(labels[by_label], kind="stable")]
        owner = np.concatenate([np.full(n, i) for i, n in enumerate(sizes)])
        place = np.concatenate([(np.arange(n) + rng.random()) / n for n in sizes])
        owner = owner[np.lexsort((owner, place))]
        return [np.sort(by_label[owner == i]) for i in range(clients)]

    def __str__(self) -> str:
        return f"size-skew:{self.ratio:g}"


@dataclass(frozen=True)
class Natural:
    """The clients that the data come with, such as hospitals. `groups` is the client of each row."""

    groups: Rows | None = field(default=None, compare=False, repr=False)

    def split(self, labels: Labels, clients: int, rng: np.random.Generator) -> list[Rows]:
        if self.groups is None:
            raise UserError("this dataset has no natural clients: use iid, dirichlet:α, shards:s or size-skew:r")
        if len(self.groups) != len(labels):
            raise UserError(f"natural clients are given for {len(self.groups)} of {len(labels)} records")
        present = np.unique(self.groups)
        if not np.array_equal(present, np.arange(clients)):
            raise UserError(
                f"the data have {len(present)} natural clients, not {clients}: leave the number of clients out"
            )
        return [np.flatnonzero(self.groups == i) for i in range(clients)]

    def __str__(self) -> str:
        return "natural"


def check_counts(records: int, clients: int, least: int = 1) -> None:
    """Refuse more clients than there are records for, `least` for each."""
    if clients < 1:
        raise UserError(f"the number of clients must be at least 1, got {clients}")
    if records < clients * least:
        needs = f"{clients} clients need at least {clients * least}"
        raise UserError(
            f"more clients than records allow: {needs} records, there are {records}: take fewer clients"
        )


def apportion(total: int, shares: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Whole numbers that sum to `total`, in proportion to `shares` (largest remainder; ties to the first)."""
    exact = np.asarray(shares, float) / np.sum(shares) * total
    counts: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def _apportion_capped(total: int, shares: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if total == 0 or np.sum(shares) == 0:
        return np.zeros(len(shares), np.int64)
    return apportion(total, shares)


def _deal(by_class: list[Rows], counts: npt.NDArray[np.int64]) -> list[Rows]:
    parts = [np.split(rows, np.cumsum(n)[:-1]) for rows, n in zip(by_class, counts, strict=True)]
    return [np.sort(np.concatenate(own)) for own in zip(*parts, strict=True)]


def parse_partition(text: str) -> Partition:
    """`iid`, `dirichlet:0.5`, `shards:2`, `size-skew:10` or `natural`."""
    kind, _, value = text.strip().lower().partition(":")
    try:
        match kind, value:
            case "iid", "":
                return Iid()
            case "natural", "":
                return Natural()
            case "dirichlet", _:
                return Dirichlet(float(value)) if value else Dirichlet()
            case "shards", _:
                return Shards(int(value)) if value else Shards()
            case "size-skew", _:
                return SizeSkew(float(value)) if value else SizeSkew()
    except UserError:
        raise
    except ValueError:
        pass
    raise UserError(f"unknown partition {text!r}: use iid, dirichlet:0.5, shards:2, size-skew:10 or natural")
