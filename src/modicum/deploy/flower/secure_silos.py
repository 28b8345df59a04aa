"""The carrier of a deployment behind secure aggregation: the server gets a sum, and no single message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.core.messages import Anything, Message, Opened, encode
from modicum.core.round_state import Collector, RoundState
from modicum.deploy.flower.secure import SecureRound, SecureSum, forget_before, survivors
from modicum.deploy.flower.silos import Silos
from modicum.deploy.silo.secure import SecureTerms
from modicum.deploy.silo.wire import Answer, Kind
from modicum.errors import UserError
from modicum.federation.secure_sums import IMPOSSIBLE, open_integers
from modicum.federation.transcript import note_received, note_sent

QUICK = 60.0  # seconds for steps without a computation, and
EACH = 6.0  # so many more for each silo: they may share a machine
BRIEF = 20.0  # seconds for silos that were silent when they were last asked; who is back is waited for again


class SecureSilos(Silos):
    """Silos whose messages are only ever added up."""

    def __init__(self, *arguments: Any, secure: SecureTerms, folder: Path, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.secure, self.folder = secure, folder
        self._silent: set[str] = set()
        self._found = SecureSum()

    def acknowledge(self, round: int) -> None:
        forget_before(self.folder, round)

    def collect(self, state: RoundState) -> Collector:
        """Nothing comes one by one."""
        return Nothing()

    def reserve(self, state: RoundState) -> list[RoundState]:
        """Note what is asked. Where the round's sum was opened before a crash, nobody is asked again."""
        self._found = SecureSum()
        stacks = super().reserve(state)
        return stacks if self._once.stored(state.round) is None else []

    def compute(self, stacks: Sequence[RoundState]) -> Iterator[tuple[RoundState, SecureSum]]:  # type: ignore[override]
        """Play the protocol."""
        for state in stacks:
            bodies = {b.client: encode(b) for b in state.broadcasts if b.client in state.events}
            note_sent(self.transcript, state.round, bodies)
            yield state, SecureRound(self.secure, self.folder, state.round, self._ask, bodies).play()

    def settle(  # type: ignore[override]
        self,
        state: RoundState,
        stack: RoundState,
        results: SecureSum,
    ) -> dict[str, Anything | None]:
        """Note who took part; of messages there is their sum alone."""
        self._found = results
        note_received(self.transcript, state.round, results.masked, results.refused, summed=False)
        state.refused, state.impossible, state.void = results.refused, results.impossible, results.void
        return {}

    def open(self, state: RoundState, collected: Collector) -> Opened | None:
        found, method = self._found, self.server.method

        def opening() -> Opened | None:
            if found.total is None:
                return None
            return open_integers(method, found.total, found.survivors, state)

        opened = self._once.open(state.round, state.model.device, opening)
        there = found.survivors
        if opened is not None and found.total is None:  # it was opened before a crash
            there = survivors(self.secure, self.folder, state.round)
        if found.total is not None and opened is None:
            state.void = IMPOSSIBLE
        state.answered = len(there)
        self._over(state, opened)
        return opened

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


class Nothing:
    """Collects nothing: a sum is all that there is."""

    def add(self, message: Message) -> None:
        raise UserError(f"behind secure aggregation nobody sees the message of {message.client!r}")

    def open(self) -> None:
        """Nothing."""
