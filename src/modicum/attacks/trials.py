"""Many trials of an audit in one run: each has a cohort, a sum and a server's noise of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import Decision, Message, Opened, Released, ReleasedSum
from modicum.core.parts import Job, Observation, Place, Policy, Scope, Signal, State
from modicum.core.release_gate import GateWatch, ReservedSumGate, SumGate
from modicum.core.round_state import Collector, RoundState
from modicum.errors import UserError
from modicum.federation.clients import Answer, Clients
from modicum.federation.cohort import SecretPoisson
from modicum.federation.correlate import rows_for
from modicum.federation.in_process import InProcess
from modicum.federation.retention import Charges, Retention
from modicum.federation.server import Server, TrustedLedger
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import BoolArray, DType, FloatArray, NoiseKey, NoiseSource
from modicum.privacy.noise.skellam import Bits
from modicum.privacy.views import SecureAggregation


@dataclass(frozen=True)
class TrialNoise:
    """A server's noise in one trial: its keys name rounds alone, so each trial has rounds of its own."""

    inner: NoiseSource
    first: int  # this trial's round 0

    def _own(self, key: NoiseKey) -> NoiseKey:
        return replace(key, round=self.first + key.round)

    def normal(self, key: NoiseKey, size: int, std: float = 1.0, dtype: DType = "float64") -> FloatArray:
        """N(0, std²), as everywhere."""
        return self.inner.normal(self._own(key), size, std, dtype)

    def uniform(self, key: NoiseKey, size: int) -> NDArray[np.float64]:
        """Multiples of 2⁻⁵³ in [0, 1)."""
        return self.inner.uniform(self._own(key), size)

    def coins(self, key: NoiseKey, size: int, rate: float) -> BoolArray:
        """True with probability `rate`."""
        return self.inner.coins(self._own(key), size, rate)

    def bits(self, key: NoiseKey) -> Bits:
        """A stream of random bytes."""
        return self.inner.bits(self._own(key))

    def describe(self) -> dict[str, Any]:
        """As the inner source."""
        return self.inner.describe()


@dataclass(frozen=True)
class EachTrial:
    """A policy that learns from releases, once for each client: trials of one client stay independent."""

    inner: Policy

    @property
    def scope(self) -> Scope:
        """As the inner policy's, and so are the next two."""
        return self.inner.scope

    @property
    def place(self) -> Place:
        return self.inner.place

    @property
    def signals(self) -> tuple[Signal, ...]:
        return self.inner.signals

    def init(self, public: PublicFacts) -> State:
        """A state for each client, which knows of that client alone."""
        return {c.name: self.inner.init(_alone(public, c)) for c in public.clients}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        """Each client's own policy decides for it."""
        return {name: self.inner.decide(state[name], round, [name])[name] for name in clients}

    def observe(self, state: State, observed: Observation) -> State:
        """Each sees its own client's release."""
        if not isinstance(observed.opened, tuple):
            raise UserError("trials of one client each are seen one by one: audit a mechanism whose messages are")
        found = dict(state)
        for released in observed.opened:
            name = released.client
            own = replace(
                observed,
                opened=(released,),
                decisions={name: observed.decisions[name]},
                left={name: observed.left[name]},
                stock={name: observed.stock[name]} if name in observed.stock else {},
            )
            found[name] = self.inner.observe(state[name], own)
        return found


def _alone(public: PublicFacts, client: ClientFacts) -> PublicFacts:
    stock = {client.name: public.stock[client.name]} if client.name in public.stock else {}
    return replace(public, clients=(client,), stock=stock)


@dataclass(frozen=True)
class TrialCohorts:
    """All clients of every trial in every round, those that its trusted server draws, or one after the other."""

    of_a_trial: int
    rounds: int
    noise: tuple[TrialNoise, ...]  # one a trial
    rate: float | None = None
    in_turn: bool = False  # where noise is correlated over rounds

    size = 1.0  # sums, not means: the adversary's own scale

    def participations(self, client: int) -> int:
        """All rounds count, drawn or not."""
        return self.rounds

    def invited(self, round: int) -> tuple[int, ...]:
        """Clients by number: those of the first trial, those of the second, and so on."""
        found: list[int] = []
        for trial, noise in enumerate(self.noise):
            drawn: Sequence[int] = (round % self.of_a_trial,) if self.in_turn else range(self.of_a_trial)
            if self.rate is not None:
                drawn = SecretPoisson(self.of_a_trial, round + 1, self.rate, noise).invited(round)
            found += [trial * self.of_a_trial + i for i in drawn]
        return tuple(found)


class TrialCarrier(InProcess):
    """Carries all trials of a world at once. `seen` is what the adversary saw of each in the last round.

    Where messages are seen that is the message as it was sent, whether or not an honest server would object to it.
    Behind secure aggregation the last clients of each cohort collude, so that their shares can be taken out of the
    sum; those before them drop out.
    """

    def __init__(
        self,
        server: Server,
        clients: Clients,
        ledger: Charges,
        trials: Sequence[Sequence[str]],
        noise_of: Sequence[TrialNoise],
        noise: NoiseSource,
        watch: GateWatch | None,
    ) -> None:
        self.trials, self.seen = trials, list[Tensor]()
        own = {name: noise_of[i] for i, names in enumerate(trials) for name in names}
        self._messages: dict[str, Message] = {}
        self._dropped, self._colluding = _roles(server, trials)

        rows = {name: rows_for(server.method.mechanism, own[name]) for names in trials for name in names[:1]}
        first = {name: names[0] for names in trials for name in names}

        def gate(tokens: Sequence[Token]) -> SumGate:
            name = tokens[0].release.client
            return ReservedSumGate(own[name], tokens, rows[first[name]])

        central = not server.method.mechanism.spec.view.senders_add_noise
        trusted = TrustedLedger(ledger, noise, watch, Retention.NOTHING, gate) if central else None
        super().__init__(
            server, clients, ledger, trusted=trusted, faults=lambda _, client: client in self._dropped
        )

    def reserve(self, state: RoundState) -> Sequence[Sequence[Job]]:
        """A round of every trial."""
        self._messages, self.seen = {}, []
        return super().reserve(state)

    def collect(self, state: RoundState) -> Collector:
        """All messages are held: each trial is opened by itself."""
        return super().collect(state) if self.server.method.mechanism.individuals else Held()

    def _received(self, state: RoundState, answers: Mapping[str, Answer]) -> dict[str, Message]:
        messages = super()._received(state, answers)
        self._messages |= messages
        return messages

    def open(self, state: RoundState, collected: Collector) -> Opened | None:
        """A client that refuses leaves its trial without an outcome, which is an error."""
        for name in state.refused:
            raise UserError(f"the audit's client {name!r} refused: give it a budget for all rounds")
        if isinstance(collected, Held):
            return self._sums(state, collected.messages)
        opened = super().open(state, collected)
        self.seen = [self._messages[names[0]].update for names in self.trials]
        return opened

    def _sums(self, state: RoundState, held: Mapping[str, Message]) -> tuple[Released, ...]:
        """Each trial opened by itself, as a server with that cohort alone would open it."""
        tokens: dict[str, list[Token]] = {}
        for token in state.tokens:
            tokens.setdefault(token.release.client, []).append(token)
        released = []
        for names in self.trials:
            own = [t for name in names for t in tokens.get(name, ())]
            opened = self._one_sum(state, names, held, own)
            known = [self._messages[name].update for name in names if name in self._colluding]
            self.seen.append(opened.update - torch.stack(known).sum(0) if known else opened.update)
            released.append(Released(names[0], opened.round, opened.update, opened.signals, opened.facts))
        return tuple(released)

    def _one_sum(
        self, state: RoundState, names: Sequence[str], held: Mapping[str, Message], tokens: list[Token]
    ) -> ReleasedSum:
        trial = replace(
            state,
            cohort=tuple(names),
            events={n: state.events[n] for n in names if n in state.events},
            expected={n: state.expected[n] for n in names if n in state.expected},
            gate=None if self.trusted is None else self.trusted.gate(tokens),
        )
        sum = self.server.method.mechanism.collect(trial)
        for name in sorted(name for name in names if name in held):
            sum.add(held[name])
        opened = sum.open()
        assert isinstance(opened, ReleasedSum)
        return opened


class Held:
    """Collects messages and adds nothing up."""

    def __init__(self) -> None:
        self.messages: dict[str, Message] = {}

    def add(self, message: Message) -> None:
        self.messages[message.client] = message

    def open(self) -> None:
        """Nothing: each trial is opened by itself."""


def _roles(server: Server, trials: Sequence[Sequence[str]]) -> tuple[frozenset[str], frozenset[str]]:
    """Who drops out and who colludes, as many as the view allows."""
    view = server.method.mechanism.spec.view
    if not isinstance(view, SecureAggregation):
        return frozenset(), frozenset()
    honest, there = view.noise_shares, view.noise_shares + view.dropouts
    dropped = frozenset(name for names in trials for name in names[honest:there])
    return dropped, frozenset(name for names in trials for name in names[there:])
