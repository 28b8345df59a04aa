"""The carrier of simulations and rehearsals: all clients are in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from modicum.core.extension_points import secret_rate
from modicum.core.messages import Anything, Broadcast, Message, Opened, encode
from modicum.core.parts import Job, State
from modicum.core.release_gate import SERVER
from modicum.core.round_state import Collector, RoundState
from modicum.federation.clients import Answer, Clients
from modicum.federation.retention import Charges
from modicum.federation.secure_sums import IMPOSSIBLE, NOBODY, Collect
from modicum.federation.server import OpenedOnce, Server, TrustedLedger
from modicum.federation.transcript import AGGREGATOR, Forget, Kind, Seen, Transcript, note_opened
from modicum.federation.workers import Workers
from modicum.privacy.events import Release
from modicum.privacy.ledger.budgets import Reason, Refusal, Refused
from modicum.privacy.views import SecureAggregation, Shows

OWN_FAULT = frozenset({Reason.BAD_MODEL, Reason.BAD_BOUND})
"""Refusals of a proposal as such: the server's own doing, for which no client retires."""

Faults = Callable[[int, str], bool]
"""(round, client) → True where the client never answers; for tests and what-if experiments."""
Events = Mapping[str, tuple[Release, ...]]
Results = Sequence[tuple[Message, State]]


class InProcess:
    """Asks clients of this process. `trusted` is the ledger of a trusted server, where there is one; `integers`
    collects messages on a lattice, where they are."""

    def __init__(
        self,
        server: Server,
        clients: Clients,
        ledger: Charges,
        *,
        trusted: TrustedLedger | None = None,
        once: OpenedOnce | None = None,
        integers: Collect | None = None,
        faults: Faults | None = None,
        transcript: Transcript | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.server, self.clients, self.ledger, self.trusted, self._once = server, clients, ledger, trusted, once
        self._integers, self._workers = integers, workers
        self.faults = faults or (lambda round, client: False)
        self.transcript: Transcript = transcript or Forget()

    def acknowledge(self, round: int) -> None:
        self.clients.acknowledge(round)

    def collect(self, state: RoundState) -> Collector:
        return (self._integers or self.server.method.mechanism.collect)(state)

    def compute(self, stacks: Sequence[Sequence[Job]]) -> Iterator[tuple[Sequence[Job], Results]]:
        return (self._workers or self.clients).compute(stacks)

    def reserve(self, state: RoundState) -> Sequence[Sequence[Job]]:
        if self.trusted is None:
            return self._ask(state, state.broadcasts)
        state.events = self._charged(state)
        try:
            state.tokens = self.trusted.reserve(state.events)
        except Refused as refused:  # those without budget retire before anything is computed
            state.refused = {r.client: str(r.reason) for r in refused.refusals}
            state.events = {name: es for name, es in state.events.items() if name not in state.refused}
            state.tokens = self.trusted.reserve(state.events)
        asked = [b for b in state.broadcasts if b.client not in state.refused] if state.events else []
        if self.trusted.stored(state.round) is None and state.tokens:
            self.clients.open(b.client for b in asked)
            return self._ask(state, asked, state.events)
        reached = [b for b in asked if not self.faults(b.round, b.client)]
        state.expected = {b.client: self.clients.expected(b) for b in reached if b.client in self.clients.clients}
        return ()

    def _charged(self, state: RoundState) -> Events:
        """With a secret cohort everyone is charged, drawn or not (R5); else those who were asked."""
        secret = secret_rate(self.server.method.mechanism) is not None
        broadcasts = self.server.broadcasts_to_all(state) if secret else state.broadcasts
        return {b.client: self.clients.events(b) for b in broadcasts}

    def _ask(
        self, state: RoundState, broadcasts: Sequence[Broadcast], events: Events | None = None
    ) -> Sequence[Sequence[Job]]:
        """Carry proposals to clients, who charge them where it is they who release."""
        reached = [b for b in broadcasts if not self.faults(b.round, b.client)]
        for b in reached:
            self._note(b.client, b.round, "broadcast", SERVER, b)
        jobs, answers = self.clients.begin(reached)
        sent = {name for name, answer in answers.items() if not isinstance(answer, Refusal)}
        taking = sent | {job.broadcast.client for job in jobs}
        if events is None:
            events = {b.client: self.clients.events(b) for b in reached if b.client in taking}
        state.events = events
        state.expected = {b.client: self.clients.expected(b) for b in reached if b.client in taking}
        state.answers = self._received(state, answers)
        return self.clients.stacks(jobs)

    def settle(self, state: RoundState, stack: Sequence[Job], results: Results) -> dict[str, Message]:
        return self._received(state, self.clients.settle(stack, results))

    def _received(self, state: RoundState, answers: Mapping[str, Answer]) -> dict[str, Message]:
        """Messages as they come; refusals are noted."""
        messages = {}
        for name, answer in answers.items():
            if isinstance(answer, Refusal):
                if self.trusted is None:  # who was drawn for a secret cohort stays untold
                    state.refused[name] = str(answer.reason)
                self.transcript.record(Seen(SERVER, state.round, "refusal", name, answer.reason.encode()))
            else:
                self._note(self._sees, state.round, "message", name, answer)
                messages[name] = answer
        return messages

    def open(self, state: RoundState, collected: Collector) -> Opened | None:
        opened = self._opened(state, collected)
        note_opened(self.transcript, state.round, opened)
        self.transcript.flush()
        state.retired = {name: why for name, why in state.refused.items() if why not in OWN_FAULT}
        state.void = self._void(state, opened)
        return opened

    def _opened(self, state: RoundState, collected: Collector) -> Opened | None:
        if self.trusted is not None:
            return self.trusted.open(state, collected)
        if self._once is None:
            return collected.open()
        return self._once.open(state.round, state.model.device, collected.open)

    def _void(self, state: RoundState, opened: Opened | None) -> str:
        """Why secure aggregation gave no sum, where it gave none."""
        view = self.server.method.mechanism.spec.view
        if opened is not None or not isinstance(view, SecureAggregation):
            return ""
        answered, invited = state.answered, len(state.cohort)
        if state.void or not answered:
            return state.void or NOBODY
        if not view.enough(answered, invited):
            return f"{answered} of {invited} are too few survivors: the round is void"
        return IMPOSSIBLE

    @property
    def _sees(self) -> str:
        """Shares are summed by secure aggregation, which shows the server their sum alone."""
        return AGGREGATOR if self.server.method.mechanism.spec.view.shows is Shows.SUM else SERVER

    def _note(self, party: str, round: int, kind: Kind, sender: str, message: Anything) -> None:
        if not isinstance(self.transcript, Forget):
            self.transcript.record(Seen(party, round, kind, sender, encode(message)))
