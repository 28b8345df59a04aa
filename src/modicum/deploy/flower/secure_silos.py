"""The carrier of a deployment behind secure aggregation: the server gets a sum, and nobody's own message."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.core.messages import Opened, encode
from modicum.deploy.flower.secure import SecureRound, Sum, forget_before, survivors
from modicum.deploy.flower.silos import OWN_FAULT, Silos
from modicum.deploy.silo.secure import SecureTerms
from modicum.deploy.silo.wire import Answer, Kind
from modicum.federation.rounds import Exchange
from modicum.federation.secure_sums import IMPOSSIBLE
from modicum.federation.server import Asked, Proposal
from modicum.federation.transcript import note_opened, note_received, note_sent

QUICK = 60.0  # seconds for steps without a computation, and
EACH = 6.0  # so many more for each silo: they may share a machine
BRIEF = 20.0  # seconds for silos that were silent when they were last asked; who is back is waited for again


class SecureSilos(Silos):
    """Silos whose messages are only ever added up."""

    def __init__(self, *arguments: Any, secure: SecureTerms, folder: Path, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.secure, self.folder = secure, folder
        self._silent: set[str] = set()

    def acknowledge(self, round: int) -> None:
        forget_before(self.folder, round)

    def exchange(self, proposal: Proposal) -> Exchange:
        """Note what is asked, play the protocol, and open its sum once."""
        begun, events = time.monotonic(), self._note_asked(proposal)
        self.bytes_up, self.bytes_down, self.waited = {}, {}, {}
        found, asked = Sum(), Asked(events, {})

        def opening() -> Opened | None:
            nonlocal found
            bodies = {b.client: encode(b) for b in proposal.broadcasts if b.client in events}
            note_sent(self.transcript, proposal.round, bodies)
            found = SecureRound(self.secure, self.folder, proposal.round, self._ask, bodies).play()
            note_received(self.transcript, proposal.round, found.masked, found.refused, summed=False)
            if found.total is None:
                return None
            return self.server.open_sum(proposal, found.total, found.survivors, asked)

        opened = self._once.open(proposal.round, self.server.state.model.device, opening)
        note_opened(self.transcript, proposal.round, opened)
        self.transcript.flush()
        if opened is not None and found.total is None:  # it was opened before a crash
            found.survivors = survivors(self.secure, self.folder, proposal.round)
        if found.total is not None and opened is None:
            found.void = IMPOSSIBLE
        retired = {n: c for n, c in found.refused.items() if c not in OWN_FAULT}
        return Exchange(
            opened,
            len(found.survivors),
            found.refused,
            retired,
            found.impossible,
            void=found.void,
            traffic=self.traffic(begun),
            parties=self.parties(),
        )

    def _ask(self, kind: Kind, bodies: Mapping[str, bytes]) -> dict[str, Answer]:
        """One step. A silo that is gone costs one long wait, not one in every round."""
        seconds = self.seconds if kind is Kind.MASKED else min(self.seconds, QUICK + EACH * len(bodies))
        lost = bodies.keys() & self._silent if kind is Kind.KEYS else set()
        answers = self.courier.ask(kind, {n: b for n, b in bodies.items() if n not in lost}, seconds)
        if lost:
            again = {n: b for n, b in bodies.items() if n in lost}
            answers |= self.courier.ask(kind, again, min(seconds, BRIEF))
        self._silent = (self._silent | bodies.keys()) - answers.keys()
        for name, body in bodies.items():
            self.bytes_down[name] = self.bytes_down.get(name, 0) + len(body)
            given = len(answers[name].body) if name in answers else 0
            self.bytes_up[name] = self.bytes_up.get(name, 0) + given
            waited = answers[name].seconds if name in answers else None
            if waited is not None:
                self.waited[name] = self.waited.get(name, 0.0) + waited
        return answers
