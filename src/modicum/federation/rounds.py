"""The one loop: propose → reserve → for each stack compute, settle, add → open → combine → observe → record.

Simulation, rehearsal, audit and deployment differ in the carrier, which takes proposals to clients wherever they
are, and in the ledger; every setting means the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from modicum.core.messages import Opened
from modicum.core.round_state import Collector, RoundState
from modicum.core.unchanged import name_unchanged, unchanged
from modicum.federation.checkpoints import Folder
from modicum.federation.evaluation import Evaluation
from modicum.federation.records import RoundRecord
from modicum.federation.retention import Charges
from modicum.federation.round_record import record_of
from modicum.federation.server import Server

Stack = Any
"""What some clients are to compute together: jobs, or a proposal to silos."""


class Carrier(Protocol):
    """Takes proposals to clients, wherever they are, and brings back what the mechanism's view lets be seen."""

    @property
    def ledger(self) -> Charges:
        """Where reservations are written."""

    def reserve(self, state: RoundState) -> Sequence[Stack]:
        """Charge what is asked for, durably, before any record is touched: what may be computed now."""

    def collect(self, state: RoundState) -> Collector:
        """What takes this round's messages."""

    def compute(self, stacks: Sequence[Stack]) -> Iterable[tuple[Stack, Any]]:
        """Each stack and what came of it, in the order of the stacks."""

    def settle(self, state: RoundState, stack: Stack, results: Any) -> Mapping[str, object]:
        """Messages that may be sent, since the ledger of whoever is charged has them; refusals are noted."""

    def open(self, state: RoundState, collected: Collector) -> Opened | None:
        """What is seen of the round: once, whatever happens to the process."""

    def acknowledge(self, round: int) -> None:
        """Everything before this round is in the server's durable state: messages of it may be forgotten."""


class Rounds:
    """Plays the rounds of a server over a carrier. Without an evaluation nothing is measured, without a folder
    nothing is kept."""

    def __init__(
        self,
        server: Server,
        carrier: Carrier,
        evaluation: Evaluation | None = None,
        folder: Folder | None = None,
    ) -> None:
        self.server, self.carrier, self.evaluation, self.folder = server, carrier, evaluation, folder
        self._first = server.state.model if server.state.round == 0 else None
        self._moves = 0

    def __iter__(self) -> Iterator[RoundRecord]:
        """Play what is left, round by round."""
        while not self.server.finished:
            yield self.play()

    def play(self) -> RoundRecord:
        """One round."""
        state, stacks = self.begin()
        for stack, results in self.carrier.compute(stacks):
            self.add(state, self.carrier.settle(state, stack, results))
        return self.conclude(state)

    def begin(self) -> tuple[RoundState, Sequence[Stack]]:
        """Propose and reserve; nothing is computed."""
        state = self.server.propose()
        stacks = self.carrier.reserve(state)
        state.collected = self.carrier.collect(state)
        self.add(state, state.answers)
        return state, stacks

    def add(self, state: RoundState, answers: Mapping[str, object]) -> None:
        """Take what is possible of these answers into what the round has collected."""
        for message in self.server.read(state, answers):
            state.collected.add(message)

    def conclude(self, state: RoundState) -> RoundRecord:
        """Open, combine, evaluate in public, observe and record; then the round's messages may be forgotten."""
        server, ledger, judged = self.server, self.carrier.ledger, self.evaluation
        state.opened = self.carrier.open(state, state.collected)
        moved = server.combine(state.opened, state.retired)
        self._moves += moved
        if self._first is not None and (self._moves > 1 or server.finished):  # half an adapter waits for the other
            left_alone, self._first = unchanged(self._first, server.state.model, server.public.tensors), None
            name_unchanged(left_alone, f"after round {state.round + 1}", "neither training nor noise reaches them")
        public = {} if judged is None else judged.public()
        left = ledger.left()
        server.observe(state, public, left, ledger.stock() if server.public.stock else {})
        reserved, simulated = ledger.share_reserved(), {} if judged is None else judged.simulated(state.round)
        record = record_of(
            server, state, moved=moved, reserved=reserved, left=left, public=public, simulated=simulated
        )
        if self.folder is not None:
            self.folder.keep(record, server)
        self.carrier.acknowledge(server.state.round)
        return record
