"""What happened: immutable records of Gaussian releases, or of integer ones that are worth a Gaussian, free of
any opinion on what they cost.

An event's meaning never changes once written; a new meaning needs a new `VERSION`. The noise multiplier of a
block is noise-std divided by the bound on *one unit's contribution*. Adjacency (does a replacement move the sum
by twice the bound?), view (how many noise shares are in what is seen?) and sampling (does the adversary know who
was drawn?) are recorded beside it and priced by the accountants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from modicum.errors import UserError
from modicum.privacy.correlated import Rows, correlated_to_dict, rows_from_dict
from modicum.privacy.fixed_shapes import FixedShape, shape_from_dict
from modicum.privacy.integer_noise import IntegerNoise
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import KnownTo

VERSION = 1


class Origin(StrEnum):
    """Where a parameter came from; decides between plain composition (R1) and a filter (R2)."""

    PRESET = "preset"  # fixed before the run
    PUBLIC = "public"  # a function of public values only
    RELEASED = "released"  # a function of earlier releases
    PLANNED = "planned"  # noise of a kind that the plan lists; which one follows from earlier releases (R11)


class _Draw:
    """What every sampler can be asked."""

    turns: ClassVar[int] = 1  # public batches in a fixed order, of which a unit is in one

    @property
    def chance(self) -> float | None:
        """The probability of each unit to be drawn, by coins of its own; None: there are no coins."""
        return None

    @property
    def shape(self) -> FixedShape | None:
        """Of the passes that hide who was drawn (R16); None: as many rows as there are."""
        return None

    @property
    def overflow(self) -> float:
        """The probability a release that a capacity leaves somebody out on account of one unit: δ pays for it."""
        return 0.0

    def participations(self, releases: int) -> int:
        """In how many of so many successive releases a unit is at most."""
        return releases


@dataclass(frozen=True)
class NoSampling(_Draw):
    """Every unit contributes."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"kind": "none"}


@dataclass(frozen=True)
class Poisson(_Draw):
    """Each unit contributes independently with probability `rate`, fresh coins for every release."""

    rate: float
    known_to: KnownTo
    shape: FixedShape | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "known_to", KnownTo(self.known_to))
        if not 0 < self.rate <= 1:
            raise UserError(f"a sampling rate must lie in (0, 1], got {self.rate}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        said = {"kind": "poisson", "rate": self.rate, "known_to": str(self.known_to)}
        return said if self.shape is None else {**said, "shape": self.shape.to_dict()}

    @property
    def chance(self) -> float:
        return self.rate

    @property
    def overflow(self) -> float:
        return 0.0 if self.shape is None else self.shape.overflow(self.rate)


@dataclass(frozen=True)
class Shuffled(_Draw):
    """Batches of a shuffled pass: each unit is in exactly one of them. One event is one whole pass (R4)."""

    batches: int = 1  # of a pass, each noised by itself

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise UserError(f"a shuffled pass has at least 1 batch, got {self.batches}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"kind": "shuffled"} if self.batches == 1 else {"kind": "shuffled", "batches": self.batches}


@dataclass(frozen=True)
class Cyclic(_Draw):
    """Batches in a fixed public order, one a release: release t has batch t mod `batches`, so that each unit is in
    every `batches`-th of them and nothing is drawn (R19). Which batch is whose follows from public sizes alone."""

    batches: int

    def __post_init__(self) -> None:
        if self.batches < 2:
            raise UserError(f"batches that come in turn are at least 2, got {self.batches}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"kind": "cyclic", "batches": self.batches}

    @property
    def turns(self) -> int:  # type: ignore[override]
        """Its batches."""
        return self.batches

    def participations(self, releases: int) -> int:
        return -(-releases // self.batches)


Sampler = NoSampling | Poisson | Shuffled | Cyclic


def integers_to_dict(integers: IntegerNoise | None) -> dict[str, Any]:
    """Releases with floating-point noise say nothing, as they always have."""
    return {} if integers is None else {"integers": integers.to_dict()}


def integers_from_dict(d: dict[str, Any]) -> IntegerNoise | None:
    """Back from `integers_to_dict`; None where the noise is of floats."""
    return IntegerNoise.from_dict(d["integers"]) if "integers" in d else None


def sampler_from_dict(d: dict[str, Any]) -> Sampler:
    """Back from a sampler's `to_dict`; an unknown kind is refused."""
    match d:
        case {"kind": "none"}:
            return NoSampling()
        case {"kind": "poisson", "rate": rate, "known_to": known_to, **rest}:
            shape = shape_from_dict(rest["shape"]) if "shape" in rest else None
            return Poisson(float(rate), KnownTo(known_to), shape)
        case {"kind": "shuffled", **rest}:
            return Shuffled(int(rest.get("batches", 1)))
        case {"kind": "cyclic", "batches": batches}:
            return Cyclic(int(batches))
    raise UserError(f"unknown sampler {d!r}")


@dataclass(frozen=True)
class Block:
    """One named part of a query: contributions of norm at most `bound`, noise of std `bound·noise_multiplier`."""

    name: str
    bound: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise UserError(f"block {self.name!r}: the bound must be positive and finite, got {self.bound}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise UserError(
                f"block {self.name!r}: the noise multiplier must be finite and at least 0 (0: in the clear), "
                f"got {self.noise_multiplier}"
            )

    @property
    def noise_std(self) -> float:
        """C · z: the noise's standard deviation in each coordinate, in the client's own message."""
        return self.bound * self.noise_multiplier

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"name": self.name, "bound": self.bound, "noise_multiplier": self.noise_multiplier}


def joint_multiplier(blocks: tuple[Block, ...]) -> float:
    """The noise multiplier of all blocks released together: z⁻² = Σ z_b⁻²."""
    if len(blocks) == 1:
        return blocks[0].noise_multiplier
    if any(b.noise_multiplier == 0 for b in blocks):
        return 0.0
    return 1 / math.sqrt(math.fsum(b.noise_multiplier**-2 for b in blocks))


@dataclass(frozen=True, kw_only=True)
class Release:
    """`count` consecutive Gaussian releases of the same query by one client, each with fresh noise and coins."""

    client: str
    round: int
    spec: PrivacySpec
    blocks: tuple[Block, ...]
    sampler: Sampler
    step: int = 0
    count: int = 1
    bound_origin: Origin = Origin.PRESET
    noise_origin: Origin = Origin.PRESET  # also covers adaptive rate and count
    integers: IntegerNoise | None = None  # where the noise is made on a lattice; None: floats
    correlated: Rows | None = None  # where noise is mixed over releases; blocks then hold that of a row (R19)
    first: int | None = None  # number of the first of these among all of the client's, where batches come in turn
    version: int = field(default=VERSION)

    def __post_init__(self) -> None:
        if not self.blocks:
            raise UserError("a release needs at least one block")
        if len({b.name for b in self.blocks}) != len(self.blocks):
            raise UserError(f"block names must differ, got {[b.name for b in self.blocks]}")
        if self.count < 1 or self.round < 0 or self.step < 0:
            raise UserError(
                f"round and step count from 0 and count from 1, got round={self.round}, step={self.step}, "
                f"count={self.count}"
            )
        if (self.first is None) == isinstance(self.sampler, Cyclic) or (self.first or 0) < 0:
            raise UserError("releases are numbered from 0 on where batches come in turn, and nowhere else")
        if self.version != VERSION:
            raise UserError(f"event version {self.version} is not known here (this is version {VERSION})")

    @property
    def noise_multiplier(self) -> float:
        """Noise of this client's message over its bound, all blocks together; where it is correlated,
        what each of its releases is worth."""
        joint = joint_multiplier(self.blocks)
        return joint if self.correlated is None else joint / self.correlated.scale

    @property
    def first_row(self) -> int:
        """The number of the row of correlated noise that the first of these releases takes."""
        return self.round if self.first is None else self.first

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal: every field, so that the charge can be recomputed from it."""
        return {
            "version": self.version,
            "client": self.client,
            "round": self.round,
            "step": self.step,
            "count": self.count,
            "spec": self.spec.to_dict(),
            "blocks": [b.to_dict() for b in self.blocks],
            "sampler": self.sampler.to_dict(),
            "bound_origin": str(self.bound_origin),
            "noise_origin": str(self.noise_origin),
            **integers_to_dict(self.integers),
            **correlated_to_dict(self.correlated),
            **({} if self.first is None else {"first": self.first}),
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Release:
        """Back from `to_dict`."""
        return cls(
            version=int(d["version"]),
            client=str(d["client"]),
            round=int(d["round"]),
            step=int(d["step"]),
            count=int(d["count"]),
            spec=PrivacySpec.from_dict(d["spec"]),
            blocks=tuple(Block(b["name"], float(b["bound"]), float(b["noise_multiplier"])) for b in d["blocks"]),
            sampler=sampler_from_dict(d["sampler"]),
            bound_origin=Origin(d["bound_origin"]),
            noise_origin=Origin(d["noise_origin"]),
            integers=integers_from_dict(d),
            correlated=rows_from_dict(d),
            first=int(d["first"]) if "first" in d else None,
        )
