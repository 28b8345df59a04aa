"""The carrier of a deployment: proposals go to silos as bytes, and whatever comes back is checked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from modicum.core.facts import ClientFacts
from modicum.core.messages import Anything, Broadcast, Expected, Noised, Opened, Sealed, Share, decode, encode
from modicum.core.parts import Asked
from modicum.core.round_state import Collector, RoundState
from modicum.deploy.silo.wire import TRANSIENT, Answer, Code, Kind
from modicum.errors import UserError
from modicum.federation.server import OpenedOnce, Server
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
        self._begun = 0.0

    def acknowledge(self, round: int) -> None:
        """A silo forgets a message when it is asked for a later one."""

    def collect(self, state: RoundState) -> Collector:
        return self.server.method.mechanism.collect(state)

    def reserve(self, state: RoundState) -> list[RoundState]:
        """Note what is asked in the server's own ledger; silos charge it in theirs."""
        self._begun, state.events = time.monotonic(), self._note_asked(state)
        self.bytes_up, self.bytes_down, self.waited = {}, {}, {}
        return [state]

    def compute(self, stacks: Sequence[RoundState]) -> Iterator[tuple[RoundState, dict[str, Answer]]]:
        """Ask all silos at once, and wait for their answers."""
        for state in stacks:
            bodies = {b.client: encode(b) for b in state.broadcasts}
            note_sent(self.transcript, state.round, bodies)
            self.bytes_down = {n: len(body) for n, body in bodies.items()}
            yield state, self.courier.ask(Kind.ROUND, bodies, self.seconds)

    def settle(
        self,
        state: RoundState,
        stack: RoundState,
        results: Mapping[str, Answer],
    ) -> dict[str, Anything | None]:
        """Messages, which silos settled before they sent them; whatever else comes is noted."""
        blobs = {n: results[n].body for n in state.events if n in results and results[n].refused is None}
        state.refused = {
            n: str(c) for n, a in results.items() if (c := a.refused) is not None and c not in TRANSIENT
        }
        summed = self.server.method.mechanism.spec.view.shows is Shows.SUM
        note_received(self.transcript, state.round, blobs, state.refused, summed=summed)
        self.bytes_up = {n: len(blob) for n, blob in blobs.items()}
        self.waited = {n: a.seconds for n, a in results.items() if a.seconds is not None}
        state.expected = {b.client: self._expected(b) for b in state.broadcasts if b.client in blobs}
        return self._decoded(blobs)

    def open(self, state: RoundState, collected: Collector) -> Opened | None:
        opened = self._once.open(state.round, state.model.device, collected.open)
        self._over(state, opened)
        return opened

    def _over(self, state: RoundState, opened: Opened | None) -> None:
        note_opened(self.transcript, state.round, opened)
        self.transcript.flush()
        state.retired = {n: c for n, c in state.refused.items() if c not in OWN_FAULT}
        state.traffic, state.parties = self.traffic(self._begun), self.parties()

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

    def _decoded(self, blobs: Mapping[str, bytes]) -> dict[str, Anything | None]:
        """In the order of names. None where bytes are no message."""
        device, found = self.server.state.model.device, dict[str, Anything | None]()
        for name in sorted(blobs):
            try:
                message = decode(blobs[name])
            except UserError:
                found[name] = None
                continue
            if isinstance(message, Noised | Sealed | Share):
                message = replace(message, update=message.update.to(device))
            found[name] = message
        return found

    def _note_asked(self, state: RoundState) -> dict[str, tuple[Release, ...]]:
        """The server's own ledger: whatever was asked may have been released, whether it arrived or not."""
        events = {}
        for b in state.broadcasts:
            try:
                events[b.client] = self.server.method.mechanism.events(self._asked(b), self.server.kit)
            except UserError:
                continue  # a bound that is no number: every silo refuses it, and no other answer is possible
            try:
                self.ledger.reserve(events[b.client])
            except Refused:
                continue  # the silo will refuse as well, and retire
        return events

    def _expected(self, b: Broadcast) -> Expected:
        return self.server.method.mechanism.expected(self._asked(b), self.server.kit)

    def _asked(self, b: Broadcast) -> Asked:
        """How often the silo took part is the server's own count."""
        earlier = len({r.round for r in self.ledger.spent(b.client) if r.round < b.round})
        return Asked(self.facts[b.client], self.plans[b.client], b, earlier)
