"""The carrier of a deployment: proposals go to silos as bytes, and whatever comes back is doubted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from modicum.core.facts import ClientFacts
from modicum.core.messages import Anything, Broadcast, Expected, Noised, Opened, Sealed, Share, decode, encode
from modicum.core.parts import ClientKit
from modicum.deploy.silo.wire import TRANSIENT, Answer, Code, Kind
from modicum.errors import UserError
from modicum.federation.rounds import Exchange
from modicum.federation.server import Asked, OpenedOnce, Proposal, Server
from modicum.federation.transcript import Forget, Transcript, note_opened, note_received, note_sent
from modicum.privacy.events import Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.budgets import Refused
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.views import Shows

OWN_FAULT = frozenset(
    {Code.BAD_MODEL, Code.BOUND_OUT_OF_RANGE, Code.NOISE_TOO_SMALL, Code.MALFORMED, Code.OUT_OF_STEP}
)
"""Refusals of a proposal as such: the server's own doing, for which no silo retires."""


class Courier(Protocol):
    """Takes one request to each named silo and waits for answers. Who does not answer in time is left out."""

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        """One question to each silo of `bodies`; the answers that come within so many seconds."""


class Silos:
    """Asks silos through a courier. `ledger` is the server's own: whatever was asked may have been released."""

    def __init__(
        self,
        courier: Courier,
        seconds: float,
        server: Server,
        ledger: Ledger,
        facts: Sequence[ClientFacts],
        plans: Mapping[str, PrivacyPlan],
        opened: Path,
        transcript: Transcript | None = None,
    ) -> None:
        self.courier, self.seconds, self.server, self.ledger, self.plans = courier, seconds, server, ledger, plans
        self.facts = {f.name: f for f in facts}
        self._once = OpenedOnce(opened)
        self.transcript: Transcript = transcript or Forget()
        self.bytes_up: dict[str, int] = {}
        self.bytes_down: dict[str, int] = {}
        self.waited: dict[str, float] = {}

    def acknowledge(self, round: int) -> None:
        """A silo forgets a message when it is asked for a later one."""

    def reserved(self) -> float:
        return self.ledger.share_reserved()

    def left(self) -> dict[str, float]:
        return self.ledger.left()

    def stock(self) -> dict[str, tuple[float, ...]]:
        return self.ledger.stock()

    def exchange(self, proposal: Proposal) -> Exchange:
        """Note what is asked, wait for answers, and open what is possible of them."""
        begun, events = time.monotonic(), self._note_asked(proposal)
        bodies = {b.client: encode(b) for b in proposal.broadcasts}
        note_sent(self.transcript, proposal.round, bodies)
        answers = self.courier.ask(Kind.ROUND, bodies, self.seconds)
        blobs = {n: answers[n].body for n in events if n in answers and answers[n].refused is None}
        refused = {n: str(c) for n, a in answers.items() if (c := a.refused) is not None and c not in TRANSIENT}
        summed = self.server.method.mechanism.spec.view.shows is Shows.SUM
        note_received(self.transcript, proposal.round, blobs, refused, summed=summed)
        self.bytes_down = {n: len(body) for n, body in bodies.items()}
        self.bytes_up = {n: len(blob) for n, blob in blobs.items()}
        self.waited = {n: a.seconds for n, a in answers.items() if a.seconds is not None}
        sent = [b for b in proposal.broadcasts if b.client in blobs]
        asked = Asked({b.client: events[b.client] for b in sent}, {b.client: self._expected(b) for b in sent})
        messages = tuple(self.server.read(proposal, self._decoded(blobs), asked))

        def opening() -> Opened | None:
            return self.server.open(proposal, messages, asked) if blobs else None

        opened = self._once.open(proposal.round, self.server.state.model.device, opening)
        note_opened(self.transcript, proposal.round, opened)
        self.transcript.flush()
        retired = {n: c for n, c in refused.items() if c not in OWN_FAULT}
        return Exchange(
            opened,
            asked.answered,
            refused,
            retired,
            asked.impossible,
            traffic=self.traffic(begun),
            parties=self.parties(),
        )

    def traffic(self, begun: float) -> dict[str, float]:
        """Seconds since, and the most bytes that one silo was sent and sent itself in this round."""
        up, down = (max(sizes.values(), default=0) for sizes in (self.bytes_up, self.bytes_down))
        return {"seconds": time.monotonic() - begun, "bytes_up": float(up), "bytes_down": float(down)}

    def parties(self) -> dict[str, dict[str, float]]:
        """Bytes of each silo that was asked, and the seconds until its answers came, where it gave any."""
        found = {}
        for name, down in self.bytes_down.items():
            found[name] = {"bytes_up": float(self.bytes_up.get(name, 0)), "bytes_down": float(down)}
            if name in self.waited:
                found[name]["seconds"] = self.waited[name]
        return found

    def _decoded(self, blobs: Mapping[str, bytes]) -> list[tuple[str, Anything | None]]:
        """In the order of names. None where bytes are no message."""
        device, found = self.server.state.model.device, list[tuple[str, Anything | None]]()
        for name in sorted(blobs):
            try:
                message = decode(blobs[name])
            except UserError:
                found.append((name, None))
                continue
            if isinstance(message, Noised | Sealed | Share):
                message = replace(message, update=message.update.to(device))
            found.append((name, message))
        return found

    def _note_asked(self, proposal: Proposal) -> dict[str, tuple[Release, ...]]:
        """The server's own ledger: whatever was asked may have been released, whether it arrived or not."""
        events = {}
        for b in proposal.broadcasts:
            try:
                events[b.client] = self.server.method.mechanism.events(*self._agreed(b))
            except UserError:
                continue  # a bound that is no number: every silo refuses it, and no other answer is possible
            try:
                self.ledger.reserve(events[b.client])
            except Refused:
                continue  # the silo will refuse as well, and retire
        return events

    def _expected(self, b: Broadcast) -> Expected:
        return self.server.method.mechanism.expected(*self._agreed(b))

    def _agreed(self, b: Broadcast) -> tuple[ClientFacts, PrivacyPlan, ClientKit, Broadcast, int]:
        """All that decides an honest answer; how often the silo took part is the server's own count."""
        earlier = len({r.round for r in self.ledger.spent(b.client) if r.round < b.round})
        return self.facts[b.client], self.plans[b.client], self.server.kit, b, earlier
