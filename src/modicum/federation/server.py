"""The server side: propose, open what came back, aggregate, observe. It sees releases and public values only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.core.extension_points import AdjustsDecisions, PublicEvaluator, Reports
from modicum.core.facts import PublicFacts
from modicum.core.messages import (
    Broadcast,
    Decision,
    Message,
    Noised,
    Opened,
    ReleasedSum,
    Sealed,
    Share,
    Summand,
    decode,
    encode,
    finite,
)
from modicum.core.parts import ClientKit, Method, Observation, State
from modicum.core.release_gate import GateWatch, ReservedSumGate, SumGate
from modicum.core.round_state import Collector, RoundState
from modicum.core.rows import NoiseRows
from modicum.core.store import write_durably
from modicum.data.arrays import Population
from modicum.errors import UnsoundError
from modicum.federation.cohort import Cohorts
from modicum.federation.plausible import objection
from modicum.federation.retention import Charges, Retention, settle
from modicum.privacy.events import Release
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseSource

LOG = logging.getLogger("modicum.server")
SumGateMaker = Callable[[Sequence[Token]], SumGate]


@dataclass
class ServerState:
    """What a checkpoint holds."""

    round: int
    model: Tensor
    policy: State
    aggregation: State
    retired: dict[str, str] = field(default_factory=dict)
    average: Tensor | None = None  # of the models so far, where one is asked for
    averaged: int = 0  # how many they were

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds; `Server.restore` takes it back."""
        return {
            "round": self.round,
            "model": self.model,
            "policy": self.policy,
            "aggregation": self.aggregation,
            "retired": self.retired,
            "average": self.average,
            "averaged": self.averaged,
        }


class Server:
    """Runs the rounds of one method over whatever carries messages to the clients and back."""

    def __init__(
        self,
        method: Method,
        public: PublicFacts,
        cohorts: Cohorts,
        run: str,
        kit: ClientKit,
        first: Tensor,
        average: float = 0.0,
        bounds: tuple[float, float] | None = None,
        evaluate: PublicEvaluator | None = None,
        population: Population | None = None,
    ) -> None:
        _refuse_unequal_noise(method, public)
        self.method, self.public, self.cohorts, self.run, self.kit = method, public, cohorts, run, kit
        self.average, self.bounds, self.evaluate = average, bounds, evaluate
        self.names = tuple(c.name for c in public.clients)
        self._population = population
        self.state = ServerState(0, first, method.policy.init(public), method.aggregation.init(public))

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.state = ServerState(**saved)

    @property
    def reported(self) -> Tensor:
        """The model that is evaluated and kept: the average of those so far where one is asked for, else the last.

        Both are functions of releases alone. Clients go on from the last one.
        """
        return self._counting if self.state.average is None else self.state.average

    @property
    def _counting(self) -> Tensor:
        """The last model, as the aggregation wants it judged."""
        rule = self.method.aggregation
        return (
            rule.reported(self.state.aggregation, self.state.model)
            if isinstance(rule, Reports)
            else self.state.model
        )

    def full_model(self, first: Tensor) -> Tensor:
        """All parameters: what the server has, and the initial values of those that stay with clients."""
        theta = first.clone()
        theta[self.kit.shared] = self.reported
        return theta

    @property
    def finished(self) -> bool:
        """Whether all rounds are played, or nobody is left to ask."""
        return self.state.round >= self.public.rounds or len(self.state.retired) == len(self.names)

    def propose(self) -> RoundState:
        """Decisions for everyone, and a broadcast for each client of this round's cohort that has not retired."""
        t = self.state.round
        chosen = self._within(self.method.policy.decide(self.state.policy, t, self.names))
        if isinstance(rule := self.method.mechanism, AdjustsDecisions):
            chosen = rule.decisions(chosen, self.public.multipliers)
        name = self.names.__getitem__ if self._population is None else self._population.name
        cohort = tuple(name(i) for i in self.cohorts.invited(t))
        return RoundState(
            t,
            self.state.model,
            chosen,
            cohort,
            self.cohorts.size,
            self._broadcasts(cohort, chosen),
            self.kit.integers,
            self.public.features,
        )

    def _within(self, chosen: Mapping[str, Decision]) -> dict[str, Decision]:
        """C within the agreed bounds: clients refuse others, and hostile signals must not lead there."""
        if self.bounds is None:
            return dict(chosen)
        low, high = self.bounds
        return {name: replace(d, bound=min(max(d.bound, low), high)) for name, d in chosen.items()}

    def _broadcasts(self, names: Sequence[str], decisions: Mapping[str, Decision]) -> tuple[Broadcast, ...]:
        t, model = self.state.round, self.state.model
        due = tuple(m.name for m in self.kit.metrics if t % m.every == 0)
        return tuple(
            Broadcast(self.run, t, name, decisions[self._charged(name)], model, due)
            for name in names
            if self._charged(name) not in self.state.retired
        )

    def _charged(self, name: str) -> str:
        """Under which name a client has its plan: a population has one for all of its clients."""
        return name if self._population is None else self._population.everybody

    def broadcasts_to_all(self, state: RoundState) -> tuple[Broadcast, ...]:
        """The proposal as it would be sent to everyone: what a secret cohort's members are charged for."""
        return self._broadcasts(self.names, state.decisions)

    def read(self, state: RoundState, answers: Mapping[str, object]) -> list[Message]:
        """Answers that are possible. Who sent another counts as absent in this round (R14).

        The round's state is told who answered, and whose answer no honest client can have sent.
        """
        possible = []
        for name, answer in answers.items():
            found = self._read(answer, name, state)
            if isinstance(found, str):
                state.impossible[name] = found
                LOG.warning("round %d: %s counts as absent: %s", state.round + 1, name, found)
            else:
                possible.append(found)
        state.answered += len(possible)
        return possible

    def _read(self, message: object, name: str, state: RoundState) -> Message | str:
        """The message, or why there is none: whatever a client sends, at most that client counts as absent."""
        if message is None:
            return "its bytes are not a message of this version"
        if not isinstance(message, Noised | Sealed | Share | Summand) or name not in state.expected:
            return "it sent something else than an answer"
        if (message.client, message.round) != (name, state.round):
            return "its answer is another client's or another round's"
        if not isinstance(message, self._kind):
            return "its answer is of a kind that this run does not have"
        if isinstance(message, Summand):  # nobody looks into one: their sum is checked
            return message
        if (message.update.shape, message.update.dtype) != (state.model.shape, state.model.dtype):
            return "its update has another shape or precision than the model"
        return objection(message, state.expected[name], state.model) or message

    @property
    def _kind(self) -> type[Message]:
        """The only kind of message that the view and the noise of this run have."""
        if self.method.mechanism.individuals:
            return Noised
        if not self.method.mechanism.spec.view.senders_add_noise:
            return Sealed
        return Share if self.kit.integers is None else Summand

    def combine(self, opened: Opened | None, retired: Mapping[str, str]) -> bool:
        """Whether there is a new model; an abandoned or empty round leaves it as it is, and so does one whose
        model would not be finite: clients could only refuse that. `retired` names clients that retire."""
        state, moved = self.state, False
        if opened is not None:
            combine = self.method.aggregation.combine
            model, aggregation = combine(state.aggregation, state.model, opened, self.evaluate)
            moved = finite(model)
            if moved:
                state.model, state.aggregation = model, aggregation
                self._remember()
            else:
                LOG.warning("round %d: its model would not be finite, so the last one stays", state.round + 1)
        state.retired = {**state.retired, **retired}
        state.round += 1
        return moved

    def _remember(self) -> None:
        """Σ β^(t−s)·θ_s / Σ β^(t−s): an exponential average whose weights add up to one from the start."""
        state, beta = self.state, self.average
        if not beta:
            return
        state.averaged += 1
        share = (1 - beta) / (1 - beta**state.averaged)
        before = self._counting if state.average is None else state.average
        state.average = torch.lerp(before, self._counting, share)

    def observe(
        self,
        state: RoundState,
        public: Mapping[str, float],
        left: Mapping[str, float],
        stock: Mapping[str, tuple[float, ...]],
    ) -> None:
        """Let the policy see the round: its releases, the new model's evaluation on public data, what is `left` of
        each client's plan or filter, and of its plan's `stock` of kinds."""
        observed = Observation(state.round, state.opened, state.decisions, public, left=left, stock=stock)
        self.state.policy = self.method.policy.observe(self.state.policy, observed)


def _refuse_unequal_noise(method: Method, public: PublicFacts) -> None:
    """In a sum all clients share one noise (R7): said before the run, not by the first round's opening."""
    noises = set(public.multipliers.values())
    if not method.mechanism.individuals and 0.0 in noises and len(noises) > 1:
        raise UnsoundError(
            "a client without a budget adds no noise, so the others' sum would hold too little (R7): give every "
            "client a finite budget, or use the view server-sees-messages"
        )


class TrustedLedger:
    """A trusted server's own bookkeeping: it reserves for every client the sum may depend on, and settles."""

    def __init__(
        self,
        ledger: Charges,
        noise: NoiseSource,
        watch: GateWatch | None = None,
        keep: Retention = Retention.MESSAGES,
        gate: SumGateMaker | None = None,
        rows: NoiseRows | None = None,
    ) -> None:
        self.ledger, self.noise, self._watch, self._keep = ledger, noise, watch, keep
        self._make_gate = gate or (lambda tokens: ReservedSumGate(self.noise, tokens, rows))
        kept = ledger.outbox() if keep is Retention.MESSAGES else []
        self._sent = {t.release.round: t for t in kept if ledger.message(t)}

    def stored(self, round: int) -> ReleasedSum | None:
        """The release of a round that was settled before a crash: it stands as it is."""
        token = self._sent.get(round)
        message = None if token is None else decode(self.ledger.message(token))
        return message if isinstance(message, ReleasedSum) else None

    def reserve(self, events: Mapping[str, tuple[Release, ...]]) -> list[Token]:
        """One transaction for all; raises `Refused` with everyone whose budget is used up."""
        return self.ledger.reserve([e for es in events.values() for e in es], redo=self._keep.redoes)

    def open(self, state: RoundState, collected: Collector) -> ReleasedSum | None:
        """The sum that was released before a crash, else a new one, settled before anybody uses it."""
        stored = self.stored(state.round)
        if stored is not None:
            state.answered = len(state.expected)
            return stored
        if not state.tokens:  # nobody has budget left
            return None
        state.gate = self.gate(state.tokens)
        opened = collected.open()
        assert isinstance(opened, ReleasedSum)
        self.settle(state.tokens, opened)
        return opened

    def gate(self, tokens: Sequence[Token]) -> SumGate:
        """The server's gate for one sum, open for what these tokens reserve."""
        gate = self._make_gate(tokens)
        return gate if self._watch is None else self._watch.server(gate)

    def settle(self, tokens: Sequence[Token], opened: ReleasedSum) -> None:
        """The sum exists: settled under its tokens before anybody uses it."""
        settle(self.ledger, self._keep, [(tokens, opened)])
        if self._keep is Retention.MESSAGES:
            self._sent[opened.round] = tokens[0]


class OpenedOnce:
    """Behind secure aggregation a round has one sum, whatever happens to the process (R8).

    A second sum over other clients would differ from the first by single shares, whose noise protects nobody. So
    the sum is on disk before anybody uses it, and a round that is done again goes on with that one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, round: int, device: torch.device, opening: Callable[[], Opened | None]) -> Opened | None:
        """What was opened in this round before a crash, else what `opening` gives now."""
        stored = self.stored(round)
        if stored is not None:
            return replace(stored, update=stored.update.to(device))
        opened = opening()
        if isinstance(opened, ReleasedSum):
            write_durably(self._path, encode(opened))
        return opened

    def stored(self, round: int) -> ReleasedSum | None:
        """What was opened in this round, if it was."""
        message = decode(self._path.read_bytes()) if self._path.exists() else None
        return message if isinstance(message, ReleasedSum) and message.round == round else None
