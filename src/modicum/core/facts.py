"""What is public before a run: of clients, of features, and of the metrics that clients declare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.errors import UserError


@dataclass(frozen=True)
class ClientFacts:
    """What everyone may know of a client before the run."""

    name: str
    records: int  # public under zero-out and replace-one, a declared constant under add-remove (R4)
    budget: float
    participations: int
    validation: int = 0  # records it holds out for paid metrics; public or declared like `records`

    def __post_init__(self) -> None:
        # A client's name is a folder's name and a key of its noise; the server's own key is "(server)".
        if not self.name or self.name != self.name.strip(" .") or _unfit(self.name):
            raise UserError(
                f"rename client {self.name!r}: a name is not empty, holds none of / \\ ( ), can be printed and "
                "does not begin or end with a dot or a space"
            )


def _unfit(name: str) -> bool:
    """Characters that lead out of a folder, or that a terminal or a reader of logs would obey."""
    return bool(set(name) & set("/\\()")) or not name.isprintable()


@dataclass(frozen=True, eq=False)
class FeatureFacts:
    """What is public of classes and features, from public records alone; None where there are none."""

    classes: int
    between: Tensor | None = None  # of a public geometry: variance of class means along each feature
    within: Tensor | None = None  # and of records about their class's mean
    sums: Tensor | None = None  # of public records with the task's own labels, by class
    counts: Tensor | None = None
    known: tuple[Tensor, Tensor] | None = None  # those records themselves (n × features) and their labels
    width: int = 0  # how many the public network made, before any geometry; 0: there is none

    def between_of(self, size: int) -> Tensor:
        """Of so many features; all alike where nothing is known."""
        return torch.ones(size, dtype=torch.double) if self.between is None else self.between.double()

    def within_of(self, size: int) -> Tensor:
        """Of so many features; where nothing is known, of records of length 1 spread evenly."""
        return torch.full((size,), 1 / size).double() if self.within is None else self.within.double()


@dataclass(frozen=True)
class PublicFacts:
    """What a policy and an aggregation may know before the run."""

    clients: tuple[ClientFacts, ...]
    rounds: int
    dimension: int
    multipliers: Mapping[str, float]  # frozen noise multiplier of each client's plan; empty where it adapts
    adaptive_noise: bool = False
    features: FeatureFacts | None = None
    tensors: tuple[tuple[str, int], ...] = ()  # names and sizes of the shared parameters, in their order
    # Where noise comes in kinds (R11): multiples of each client's own multiplier, and for how many participations
    # its plan holds each, or its filter would let each through alone. Else empty.
    scales: tuple[float, ...] = ()
    stock: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def noise_of_sum(noises: Sequence[float], records: Sequence[int]) -> float:
    """Noise over bound of the mean over everybody's records behind a sum: √N/Σ(n_i/z_i).

    Each part is scaled by z_min/z_i, the mean divides by Σ n_i·z_min/z_i, and N shares of z_min add up (R13).
    """
    return math.sqrt(len(noises)) / sum(n / z for z, n in zip(noises, records, strict=True))


@dataclass(frozen=True)
class Metric:
    """A sum over a client's own validation records, at most 1 each, released with noise every `every` rounds.

    Which there are is for the task to say.
    """

    name: str  # e.g. "accuracy"
    every: int
    noise_multiplier: float  # in what the adversary sees

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.noise_multiplier < float("inf"):
            raise UserError(
                "a metric needs a number of rounds of at least 1 and a positive finite noise multiplier, got "
                f"{self.every} and {self.noise_multiplier}"
            )

    @property
    def block(self) -> str:
        """The name under which the metric stands in a release and in a plan."""
        return f"metric:{self.name}"
