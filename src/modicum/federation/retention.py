"""What becomes of a message once it is charged, and what clients need of whoever does the charging."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from modicum.core.messages import Message, ReleasedSum, encode, encoded_parts
from modicum.core.threads import spread
from modicum.privacy.events import Release
from modicum.privacy.ledger.grammar import Settlement
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseSource


class Retention(StrEnum):
    """How much of a settled message is kept until the server has acknowledged its round."""

    MESSAGES = "messages"  # all of it: with fresh noise it cannot be made again, and a retry gets the same bytes
    DIGESTS = "digests"  # seeded noise: the message is computed again, and must be the one that was settled
    NOTHING = "nothing"  # a rehearsal, which ends with its process

    @classmethod
    def for_noise(cls, noise: NoiseSource) -> Retention:
        """Only what is drawn from a seed can be computed again bit for bit."""
        return cls.DIGESTS if noise.describe()["simulation"] else cls.MESSAGES

    @property
    def redoes(self) -> bool:
        """Whether a round after a crash is computed again and must come out the same."""
        return self is Retention.DIGESTS


class Charges(Protocol):
    """A ledger as clients see it: durable, or in memory for a rehearsal."""

    run_id: str

    def reserve(self, releases: Iterable[Release], *, redo: bool = False) -> list[Token]:
        """A token for each release, all or none; with `redo` those of an earlier attempt are given again."""

    def settle_many(self, settled: Iterable[tuple[Token, bytes]], *, store: bool = True) -> None:
        """The messages under these tokens exist; with `store` they are kept, else their digests alone."""

    def settle_digests(self, settled: Iterable[tuple[Token, Settlement]]) -> None:
        """The same where nothing but digests is needed."""

    def message(self, token: Token) -> bytes:
        """The kept message of a settled token."""

    def outbox(self) -> list[Token]:
        """Tokens whose messages are kept."""

    def unsettled(self) -> list[Token]:
        """Tokens that are charged and have no message."""

    def prune_before(self, round: int) -> None:
        """Forget messages of earlier rounds; charges stay."""

    def charges(self) -> Iterable[Release]:
        """All that is charged to anyone, in order."""

    def share_reserved(self) -> float:
        """Share of the planned releases that is charged, in the mean over clients (R3)."""

    def left(self) -> dict[str, float]:
        """Share of each client's plan or filter that may still be reserved."""

    def stock(self) -> dict[str, tuple[float, ...]]:
        """What each client's plan still holds of each kind of noise."""


def settle(
    ledger: Charges, keep: Retention, sent: Iterable[tuple[Sequence[Token], Message | ReleasedSum]]
) -> None:
    """Each message under its first token; further queries of the same message are settled beside it, empty."""
    if keep is Retention.MESSAGES:
        ledger.settle_many(
            (token, blob if i == 0 else b"")
            for tokens, blob in ((tokens, encode(message)) for tokens, message in sent)
            for i, token in enumerate(tokens)
        )
    elif keep is Retention.DIGESTS:
        nothing = Settlement.of()
        alike = list(sent)
        digests = spread(lambda one: Settlement.of(*encoded_parts(one[1])), alike)
        ledger.settle_digests(
            (token, said if i == 0 else nothing)
            for (tokens, _), said in zip(alike, digests, strict=True)
            for i, token in enumerate(tokens)
        )
