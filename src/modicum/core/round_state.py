"""One round from its proposal to what came of it, and what collects its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from modicum.core.facts import FeatureFacts
from modicum.core.integers import Agreed
from modicum.core.messages import Broadcast, Decision, Expected, Message, Opened
from modicum.core.release_gate import SumGate
from modicum.privacy.events import Release
from modicum.privacy.ledger.token import Token


class Collector(Protocol):
    """Takes a round's messages one by one, in the order of clients' names; where a sum is seen it keeps none."""

    def add(self, message: Message) -> None:
        """Take a message that an honest client can have sent."""

    def open(self) -> Opened | None:
        """What may be seen of all of them; None when the round must be abandoned."""


@dataclass
class RoundState:
    """What the server knows of one round: filled in as the round goes on, and gone when it is over."""

    round: int
    model: Tensor  # shared parameters before the round
    decisions: Mapping[str, Decision]  # of every client
    cohort: tuple[str, ...]  # whom the rule for cohorts names; fixed and public, unless it is a secret
    denominator: float  # the cohort's fixed public (or expected) size
    broadcasts: tuple[Broadcast, ...] = ()  # to those of the cohort who have not retired
    integers: Agreed | None = None  # the terms of integer noise, where messages are on a lattice
    features: FeatureFacts | None = None  # what is public of classes and features

    # Reserved, before any record is touched.
    events: Mapping[str, tuple[Release, ...]] = field(default_factory=dict)  # of each client that is charged
    expected: Mapping[str, Expected] = field(default_factory=dict)  # of each client that was asked
    answers: Mapping[str, object] = field(default_factory=dict)  # that were settled before a crash
    tokens: Sequence[Token] = ()  # a trusted server's
    gate: SumGate | None = None  # and its own gate, where the server adds the noise

    # As answers come.
    collected: Collector = field(init=False, repr=False)
    answered: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # who refused, and why
    retired: Mapping[str, str] = field(default_factory=dict)  # those of them who refuse every later round as well
    impossible: dict[str, str] = field(default_factory=dict)  # whose answers no honest client can have sent

    # What is seen of them.
    opened: Opened | None = None
    void: str = ""  # why secure aggregation gave no sum
    traffic: Mapping[str, float] = field(default_factory=dict)  # seconds and bytes, where messages travel
    parties: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # the same of each client

    @property
    def asked(self) -> tuple[str, ...]:
        """Whom the proposal goes to."""
        return tuple(b.client for b in self.broadcasts)
