"""What the parties of a secure aggregation agree on before its first round."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from modicum.errors import UserError
from modicum.secure_aggregation.shape import Shape, agree_shape, failure_probability

MOST_CLIENTS = 1000  # what was measured: everybody still checks everybody's signatures
MOST_COORDINATES = 1 << 28
MOST_ROUNDS = 1 << 32
SERVER = 0xFFFF  # the sender's number in what the server says; no client has it


class ProtocolError(UserError):
    """A message is refused: it is not what an honest party would have sent at this point."""


class VoidError(ProtocolError):
    """The round has no sum. What it cost stays charged.

    `client`: whose secret did not fit, where it is known. `members`: whose messages were in order, where too few
    were; all others were silent or sent something else.
    """

    def __init__(self, text: str, client: int | None = None, members: tuple[int, ...] | None = None) -> None:
        super().__init__(text)
        self.client, self.members = client, members


class Variant(StrEnum):
    """What stops a server that shows different survivors to different clients."""

    SIGNED_SURVIVORS = "signed-survivors"  # t clients' signatures over one set; the default
    HONEST_BUT_CURIOUS = "honest-but-curious"  # nothing: the server is trusted to show one set to all


class Step(IntEnum):
    """The exchanges of a round, in order. A client sends one message in each."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    CONSENT = 4  # left out when the server is trusted to be honest but curious
    REVEAL = 5


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """Public, equal for all parties and bound into every message by `digest`.

    `run` is never used twice; `keys[i]` is client i's Ed25519 public key for this run and only signs. `context`
    stands for everything else that was agreed (lattice, noise, model): any short text or digest, compared and
    never read.
    """

    run: str
    keys: tuple[bytes, ...]
    threshold: int
    colluders: int
    dropouts: int
    dimension: int
    bits: int = 32
    variant: Variant = Variant.SIGNED_SURVIVORS
    context: str = ""

    def __post_init__(self) -> None:
        P, t, c, d = self.clients, self.threshold, self.colluders, self.dropouts
        if not 0 < len(self.run) <= 64 or not self.run.isprintable():
            raise UserError("secure aggregation: a run's name is a printable text of at most 64 characters")
        if P < 2:
            raise UserError(f"secure aggregation needs at least 2 clients a round, got {P}")
        if P > MOST_CLIENTS:
            raise UserError(
                f"secure aggregation takes at most {MOST_CLIENTS} clients a round, got {P}: let cohorts of "
                f"{MOST_CLIENTS} take turns (per_round = {MOST_CLIENTS})"
            )
        if any(len(key) != 32 for key in self.keys) or len(set(self.keys)) != P:
            raise UserError("secure aggregation: every client needs an Ed25519 public key of its own (32 bytes)")
        if min(c, d) < 0 or t <= c:
            raise UserError(f"secure aggregation needs a threshold above its {c} colluders, got t={t}, d={d}")
        if P - d < t:
            raise UserError(f"secure aggregation: {P} clients less {d} dropouts are fewer than the threshold {t}")
        if self.variant is Variant.SIGNED_SURVIVORS and 2 * t <= P + c:
            raise UserError(
                f"secure aggregation against an active server needs 2t > P + c: with P={P} and c={c} the "
                f"threshold must be at least {(P + c) // 2 + 1}, got {t}"
            )
        if self.bits not in (32, 64):
            raise UserError(f"secure aggregation works modulo 2^32 or 2^64, got 2^{self.bits}")
        if not 0 < self.dimension <= MOST_COORDINATES:
            raise UserError(f"secure aggregation sums 1 to {MOST_COORDINATES} coordinates, got {self.dimension}")

    @property
    def clients(self) -> int:
        """P."""
        return len(self.keys)

    @property
    def honest(self) -> int:
        """t − c: the honest clients that are certain to be in any sum, whose noise a client may count (R13)."""
        return self.threshold - self.colluders

    @cached_property
    def shape(self) -> Shape:
        """k and t of the graph, which follow from the other terms: nobody chooses them."""
        return agree_shape(self.clients, self.threshold, self.colluders, self.dropouts, self._strays)

    @property
    def sparse(self) -> bool:
        """Whether clients draw their neighbourhoods: on the complete graph everybody is in everybody's."""
        return self.shape.neighbours < self.clients - 1

    @property
    def failure_probability(self) -> float:
        """At most this is the chance that a round's graph lets less than the whole sum be opened."""
        return failure_probability(self.clients, self.colluders, self._strays, self.shape)

    @property
    def _strays(self) -> int:
        """T sign one set, so of the others at most P − T were shown something else. A curious server shows one."""
        return self.clients - self.threshold if self.variant is Variant.SIGNED_SURVIVORS else 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Little-endian words: coordinates as they are masked and sent."""
        return np.dtype("<u4" if self.bits == 32 else "<u8")

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all terms: it stands in every message, so that parties who disagree cannot talk."""
        values = [self.run, [k.hex() for k in self.keys], self.threshold, self.colluders, self.dropouts]
        values += [self.dimension, self.bits, str(self.variant), self.context]
        values += [self.shape.neighbours, self.shape.shares]
        return hashlib.sha256(b"modicum secure aggregation terms 2" + json.dumps(values).encode()).digest()
