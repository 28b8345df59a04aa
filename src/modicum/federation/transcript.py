"""Exactly what each party sees during a run: read by non-interference tests, attacks and audits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from modicum.core.messages import Opened, ReleasedSum, encode
from modicum.core.release_gate import SERVER

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
    """Takes down what is seen. `flush` is called before a checkpoint or a sum relies on it."""

    def record(self, seen: Seen) -> None:
        """Note one thing that a party saw."""

    def flush(self) -> None:
        """What was recorded so far is safe on return."""


class Forget:
    """Keeps nothing."""

    def record(self, seen: Seen) -> None:
        pass

    def flush(self) -> None:
        pass


class Remember:
    """Keeps everything in memory."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def record(self, seen: Seen) -> None:
        self.seen.append(seen)

    def flush(self) -> None:
        pass

    def of(self, kind: Kind, *, party: str | None = None, sender: str | None = None) -> list[Seen]:
        """What was seen of one kind, by a party and from a sender where these are given."""
        return [s for s in self.seen if s.kind == kind and party in (None, s.party) and sender in (None, s.sender)]


def note_sent(transcript: Transcript, round: int, bodies: Mapping[str, bytes]) -> None:
    """Proposals, as the clients see them."""
    for name, body in bodies.items():
        transcript.record(Seen(name, round, "broadcast", SERVER, body))


def note_received(
    transcript: Transcript, round: int, blobs: Mapping[str, bytes], refused: Mapping[str, str], *, summed: bool
) -> None:
    """Answers as they came. Shares are `summed` by secure aggregation, which shows the server their sum alone."""
    for name, blob in blobs.items():
        transcript.record(Seen(AGGREGATOR if summed else SERVER, round, "message", name, blob))
    for name, reason in refused.items():
        transcript.record(Seen(SERVER, round, "refusal", name, reason.encode()))
    transcript.flush()


def note_opened(transcript: Transcript, round: int, opened: Opened | None) -> None:
    """What the server half made of the messages."""
    if isinstance(transcript, Forget):
        return  # encoding costs something
    for release in (opened,) if isinstance(opened, ReleasedSum) else opened or ():
        transcript.record(Seen(SERVER, round, "opened", SERVER, encode(release)))
