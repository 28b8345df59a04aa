"""The carrier of simulations and rehearsals: all clients are in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from modicum.core.door import SERVER
from modicum.core.messages import Anything, Broadcast, Message, Opened, ReleasedSum, encode
from modicum.core.parts import Job
from modicum.federation.clients import Answer, Clients
from modicum.federation.keep import Charges
from modicum.federation.rounds import Exchange
from modicum.federation.secure_sums import IMPOSSIBLE, NOBODY, Adder
from modicum.federation.server import Asked, OpenedOnce, Proposal, Server, TrustedLedger
from modicum.federation.transcript import AGGREGATOR, Forget, Kind, Seen, Transcript, note_opened
from modicum.privacy.events import Release
from modicum.privacy.ledger.budgets import Reason, Refusal, Refused
from modicum.privacy.ledger.token import Token
from modicum.privacy.views import SecureAggregation, Shows

OWN_FAULT = frozenset({Reason.BAD_MODEL, Reason.BAD_BOUND})
"""Refusals of a proposal as such: the server's own doing, for which no client retires."""

Faults = Callable[[int, str], bool]
"""(round, client) → True where the client never answers; for tests and what-if experiments."""
Events = Mapping[str, tuple[Release, ...]]
Parts = Iterable[Mapping[str, Answer]]
"""Answers as they come, some clients at a time."""


@dataclass
class Begun:
    """A round that is charged and not yet computed."""

    proposal: Proposal
    jobs: tuple[Job, ...]
    asked: Asked
    answers: Mapping[str, Answer]  # of those who have one already
    refused: dict[str, str]
    tokens: Sequence[Token] = ()  # a trusted server's
    stored: ReleasedSum | None = None  # what a trusted server released before a crash
    void: str = ""  # why integers were not added up


class InProcess:
    """Asks clients of this process. `trusted` is the ledger of a trusted server, where there is one; `adder` sums
    integers, where messages are on a lattice."""

    def __init__(
        self,
        server: Server,
        clients: Clients,
        ledger: Charges,
        *,
        trusted: TrustedLedger | None = None,
        once: OpenedOnce | None = None,
        adder: Adder | None = None,
        faults: Faults | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        self.server, self.clients, self.ledger, self.trusted, self._once = server, clients, ledger, trusted, once
        self._adder = adder
        self.faults = faults or (lambda round, client: False)  # noqa: ARG005
        self.transcript: Transcript = transcript or Forget()

    def acknowledge(self, round: int) -> None:
        self.clients.acknowledge(round)

    def reserved(self) -> float:
        return self.ledger.share_reserved()

    def left(self) -> dict[str, float]:
        return self.ledger.left()

    def stock(self) -> dict[str, tuple[float, ...]]:
        return self.ledger.stock()

    def exchange(self, proposal: Proposal) -> Exchange:
        begun = self.begin(proposal)
        return self.finish(begun, self.clients.compute(begun.jobs))

    def begin(self, proposal: Proposal) -> Begun:
        """Reserve; nothing is computed."""
        if self.trusted is not None:
            return self._begin_trusted(proposal, self.trusted)
        return self._ask(proposal, proposal.broadcasts)

    def finish(self, begun: Begun, parts: Parts) -> Exchange:
        """Open what clients answer."""
        messages = self.server.read(begun.proposal, self._received(begun, parts), begun.asked)
        opened = self._opened_once(begun, messages) if self.trusted is None else self._released(begun, messages)
        for _ in messages:  # clients answer all the same where what is seen of the round is known already
            pass
        note_opened(self.transcript, begun.proposal.round, opened)
        self.transcript.flush()
        refused, asked = begun.refused, begun.asked
        retired = {name: why for name, why in refused.items() if why not in OWN_FAULT}
        return Exchange(opened, asked.answered, refused, retired, asked.impossible, self._void(begun, opened))

    def _void(self, begun: Begun, opened: Opened | None) -> str:
        """Why secure aggregation gave no sum, where it gave none."""
        view = self.server.method.mechanism.spec.view
        if opened is not None or not isinstance(view, SecureAggregation):
            return ""
        answered, invited = begun.asked.answered, len(begun.proposal.cohort)
        if begun.void or not answered:
            return begun.void or NOBODY
        if not view.enough(answered, invited):
            return f"{answered} of {invited} are too few survivors: the round is void"
        return IMPOSSIBLE

    def _opened_once(self, begun: Begun, messages: Iterator[Message]) -> Opened | None:
        def opening() -> Opened | None:
            if self._adder is None:
                return self.server.open(begun.proposal, messages, begun.asked)
            added = self._adder.add(begun.proposal.round, begun.proposal.cohort, messages)
            if isinstance(added, str):
                begun.void = added
                return None
            return self.server.open_sum(begun.proposal, *added, begun.asked)

        if self._once is None:
            return opening()
        return self._once.open(begun.proposal.round, self.server.state.model.device, opening)

    def _released(self, begun: Begun, messages: Iterator[Message]) -> Opened | None:
        """A trusted server's sum: that released before a crash, else a new one, settled before it is used."""
        assert self.trusted is not None
        if begun.stored is not None:
            begun.asked.answered = len(begun.asked.expected)
            return begun.stored
        if not begun.tokens:  # nobody has budget left
            return None
        opened = self.server.open(begun.proposal, messages, begun.asked, self.trusted.door(begun.tokens))
        assert isinstance(opened, ReleasedSum)
        self.trusted.settle(begun.tokens, opened)
        return opened

    def _begin_trusted(self, proposal: Proposal, trusted: TrustedLedger) -> Begun:
        events, tokens, gone = self._reserve_trusted(proposal, trusted)
        asked = [b for b in proposal.broadcasts if b.client not in gone]
        stored = trusted.stored(proposal.round)
        if stored is None and tokens:
            return replace(self._ask(proposal, asked, events), refused=gone, tokens=tokens)
        reached = [b for b in asked if not self.faults(b.round, b.client)]
        expected = {b.client: self.clients.expected(b) for b in reached}
        return Begun(proposal, (), Asked(events, expected), {}, gone, tokens, stored)

    def _reserve_trusted(
        self, proposal: Proposal, trusted: TrustedLedger
    ) -> tuple[Events, list[Token], dict[str, str]]:
        """Charge everyone the sum may depend on; those without budget retire before anything is computed."""
        events, gone = self._charged(proposal), dict[str, str]()
        try:
            return events, trusted.reserve(events), gone
        except Refused as refused:
            gone = {r.client: str(r.reason) for r in refused.refusals}
        events = {name: es for name, es in events.items() if name not in gone}
        return events, trusted.reserve(events), gone

    def _charged(self, proposal: Proposal) -> Events:
        """With a secret cohort everyone is charged, drawn or not (R5); else those who were asked."""
        secret = self.server.method.mechanism.cohort_rate is not None
        broadcasts = self.server.broadcasts_to_all(proposal) if secret else proposal.broadcasts
        return {b.client: self.clients.events(b) for b in broadcasts}

    def _ask(self, proposal: Proposal, broadcasts: Sequence[Broadcast], events: Events | None = None) -> Begun:
        """Carry proposals to clients, who charge them where it is they who release."""
        reached = [b for b in broadcasts if not self.faults(b.round, b.client)]
        for b in reached:
            self._note(b.client, b.round, "broadcast", SERVER, b)
        begun = self.clients.begin(reached)
        sent = {name for name, answer in begun.answers.items() if not isinstance(answer, Refusal)}
        taking = sent | {job.broadcast.client for job in begun.jobs}
        if events is None:
            events = {b.client: self.clients.events(b) for b in reached if b.client in taking}
        expected = {b.client: self.clients.expected(b) for b in reached if b.client in taking}
        return Begun(proposal, begun.jobs, Asked(events, expected), begun.answers, {})

    def _received(self, begun: Begun, parts: Parts) -> Iterator[tuple[str, Message]]:
        """Messages as they come; refusals are noted."""
        for part in chain([begun.answers], parts):
            for name, answer in part.items():
                if isinstance(answer, Refusal):
                    if self.trusted is None:  # who was drawn for a secret cohort stays untold
                        begun.refused[name] = str(answer.reason)
                    self.transcript.record(
                        Seen(SERVER, begun.proposal.round, "refusal", name, answer.reason.encode())
                    )
                else:
                    self._note(self._sees, begun.proposal.round, "message", name, answer)
                    yield name, answer

    @property
    def _sees(self) -> str:
        """Shares are summed by secure aggregation, which shows the server their sum alone."""
        return AGGREGATOR if self.server.method.mechanism.spec.view.shows is Shows.SUM else SERVER

    def _note(self, party: str, round: int, kind: Kind, sender: str, message: Anything) -> None:
        if not isinstance(self.transcript, Forget):
            self.transcript.record(Seen(party, round, kind, sender, encode(message)))
