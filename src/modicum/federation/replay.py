"""Recording what passes the gates of a run, and running again with those releases in place of fresh ones.

Whatever a run shows must be a function of public values and of what has passed a gate. So a second run, on other
data and with other coins, that is given the first one's releases must show the same: decisions, opened messages,
states and models, bit for bit (non-interference). Attacks and audits read the same tape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from modicum.core.release_gate import ReleaseGate, SumGate
from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.ledger.token import Token

Values = dict[str, Tensor]
INTEGERS = "integers"  # under this name stands a release on a lattice, all blocks together


@dataclass
class Tape:
    """Everything that left a gate: by client, round, step and block names, and the trusted server's by round."""

    clients: dict[tuple[str, int, int, tuple[str, ...]], Values] = field(default_factory=dict)
    sums: dict[int, Values] = field(default_factory=dict)


def _key(release: Release, step: int) -> tuple[str, int, int, tuple[str, ...]]:
    return release.client, release.round, step, tuple(b.name for b in release.blocks)


def _copy(values: Mapping[str, Tensor]) -> Values:
    return {name: value.clone() for name, value in values.items()}


class _Around:
    """A gate around another one."""

    def __init__(self, inner: ReleaseGate, tape: Tape) -> None:
        self._inner, self._tape = inner, tape

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self._inner.tokens

    def reserve(self, release: Release) -> bool:
        return self._inner.reserve(release)

    def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
        return self._inner.sample(release, step, records, present)


class _RecordingGate(_Around):
    def release_integers(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Tensor:
        values = self._inner.release_integers(release, step, sums)
        self._tape.clients[_key(release, step)] = {INTEGERS: values.clone()}
        return values

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Values:
        values = self._inner.release(release, step, sums)
        self._tape.clients[_key(release, step)] = _copy(values)
        return values


class _ReplayingGate(_Around):
    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Values:
        self._inner.release(release, step, sums)  # it must be as welcome as the first time
        return self._recorded(release, step)

    def release_integers(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Tensor:
        self._inner.release_integers(release, step, sums)
        return self._recorded(release, step)[INTEGERS]

    def _recorded(self, release: Release, step: int) -> Values:
        if _key(release, step) not in self._tape.clients:
            raise UserError(f"client {release.client!r}: the recorded run released nothing at this point")
        return _copy(self._tape.clients[_key(release, step)])


class _SumGate:
    def __init__(self, inner: SumGate, tape: Tape, *, replay: bool) -> None:
        self._inner, self._tape, self._replay = inner, tape, replay

    def release_sum(
        self, events: Mapping[str, tuple[Release, ...]], round: int, sums: Mapping[str, Tensor]
    ) -> Values:
        values = self._inner.release_sum(events, round, sums)
        if self._replay:
            return _copy(self._tape.sums[round])
        self._tape.sums[round] = _copy(values)
        return values


@dataclass
class Recording:
    """A watch that keeps every release on its tape."""

    tape: Tape = field(default_factory=Tape)

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        return _RecordingGate(gate, self.tape)

    def server(self, gate: SumGate) -> SumGate:
        return _SumGate(gate, self.tape, replay=False)


@dataclass
class Replaying:
    """A watch that answers every release with the tape's. Give the run another noise seed."""

    tape: Tape

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        return _ReplayingGate(gate, self.tape)

    def server(self, gate: SumGate) -> SumGate:
        return _SumGate(gate, self.tape, replay=True)
