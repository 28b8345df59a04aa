"""Exactly what each party sees during a run: read by non-interference tests, attacks and audits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

AGGREGATOR = "(secure aggregation)"  # ideal: sees every share, tells nobody but the sum

Kind = Literal["broadcast", "message", "opened", "model", "refusal"]


@dataclass(frozen=True)
class Seen:
    """One thing that one party saw. `content` is the bytes on the wire."""

    party: str  # a client's name, "(server)" or "(secure aggregation)"
    round: int
    kind: Kind
    sender: str
    content: bytes = field(repr=False)


class Transcript(Protocol):
    def record(self, seen: Seen) -> None: ...


class Forget:
    """Keeps nothing."""

    def record(self, seen: Seen) -> None:
        pass


class Remember:
    """Keeps everything in memory."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def record(self, seen: Seen) -> None:
        self.seen.append(seen)

    def of(self, kind: Kind, *, party: str | None = None, sender: str | None = None) -> list[Seen]:
        return [s for s in self.seen if s.kind == kind and party in (None, s.party) and sender in (None, s.sender)]
