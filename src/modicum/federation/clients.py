"""The client side: check a proposal, reserve, compute, settle, answer.

The same code serves a simulator that holds every client and a silo that holds one. Nothing is computed before the
ledger has charged it, and nothing is sent before the ledger has stored it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from modicum.core.clips import Flat
from modicum.core.facts import ClientFacts
from modicum.core.layer_draws import layers_draw_from
from modicum.core.messages import (
    Broadcast,
    Decision,
    Expected,
    Message,
    Noised,
    Sealed,
    Share,
    Summand,
    decode,
    finite,
)
from modicum.core.own_rows import OwnRows
from modicum.core.parts import Asked, Batch, ClientKit, Job, Method, State
from modicum.core.release_gate import GateWatch, ReleaseGate, ReservedGate
from modicum.core.store import load_state, save_state
from modicum.errors import UserError
from modicum.federation.retention import Charges, Retention, settle
from modicum.privacy.events import Release
from modicum.privacy.ledger.budgets import Reason, Refusal, Refused
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseKey, NoiseSource, SimulatedNoise
from modicum.privacy.plan import PrivacyPlan

Reserve = Callable[[Release], Token | None]
GateMaker = Callable[[tuple[Token, ...], Reserve], ReleaseGate]
Answer = Message | Refusal

BOUNDS = (1e-12, 1e12)  # outside, clipped values or their noise leave the range of single precision


@dataclass
class Client:
    """One client: its data, its plan, and what it keeps for itself between rounds."""

    facts: ClientFacts
    plan: PrivacyPlan
    records: Batch
    validation: Batch
    state: State = field(default_factory=dict)
    rounds: set[int] = field(default_factory=set)  # rounds it has reserved so far


class Clients:
    """Answers proposals on behalf of one or many clients that share a ledger.

    `done` is the server's round: everything before it is in the server's durable state. `rows` is where their own
    correlated noise comes from, if not from `noise`.
    """

    def __init__(
        self,
        method: Method,
        kit: ClientKit,
        clients: Sequence[Client],
        ledger: Charges,
        noise: NoiseSource,
        folder: Path | None = None,
        at_once: int = 1,
        gate: GateMaker | None = None,
        watch: GateWatch | None = None,
        keep: Retention = Retention.MESSAGES,
        done: int = 0,
        rows: NoiseSource | None = None,
        member: Callable[[str], Batch] | None = None,
    ) -> None:
        self._member, self._opened = member, list[str]()
        self.method, self.kit, self.ledger, self.noise = method, kit, ledger, noise
        self.clients = {client.facts.name: client for client in clients}
        seeded = noise if noise.describe()["simulation"] else None
        self.rows = OwnRows(rows or seeded, (client.plan for client in clients))
        self._folder = folder
        self._at_once = at_once
        self._make_gate = gate or self._reserved_gate
        self._watch = watch
        self._keep, self._done = keep, done
        self._sent: dict[tuple[str, int], Token] = {}
        self._asked: dict[
            str, tuple[Broadcast, tuple[Release, ...]]
        ] = {}  # a client's last proposal and its events
        self._before: dict[tuple[str, int], State] = {}  # states that a round began with, where it can be redone
        self._recall()

    @property
    def charges_here(self) -> bool:
        """Behind a trusted server it is the server that releases and is charged."""
        return self.method.mechanism.spec.view.senders_add_noise

    def answer(self, broadcasts: Sequence[Broadcast]) -> dict[str, Answer]:
        """Each client's message, which may be sent, or why it refuses."""
        jobs, answers = self.begin(broadcasts)
        for stack, results in self.compute(self.stacks(jobs)):
            answers |= self.settle(stack, results)
        return answers

    def begin(self, broadcasts: Sequence[Broadcast]) -> tuple[list[Job], dict[str, Answer]]:
        """Check and charge, before any record is touched: jobs in the order of names, and who has an answer
        already."""
        answers: dict[str, Answer] = {}
        fresh, usable = [], dict[int, bool]()
        for b in sorted(broadcasts, key=lambda b: b.client):
            reason = self._objection(b, usable)
            if reason is not None:
                answers[b.client] = Refusal(b.client, reason)
            elif (b.client, b.round) in self._sent:  # a retry gets the stored message, bit for bit
                answers[b.client] = self._stored(b)
            else:
                fresh.append(b)
        tokens = self._reserve({b.client: self.events(b) for b in fresh}, answers)
        return [self._job(b, tokens[b.client]) for b in fresh if b.client in tokens], answers

    def open(self, names: Iterable[str]) -> None:
        """Clients of a population who were drawn: here until their round is acknowledged, with the plan of all."""
        if self._member is None:
            return
        everybody = next(iter(self.clients.values()))
        for name in names:
            try:
                records = self._member(name)
            except UserError:
                if self._keep.redoes:
                    raise
                continue  # it counts as absent: a run that stopped here would tell that it was drawn (R5)
            facts = replace(everybody.facts, name=name, records=len(records))
            self.clients[name] = Client(facts, everybody.plan, records, everybody.validation)
            self._opened.append(name)

    def stacks(self, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Jobs that are computed together, by the clients' order alone: so few that memory holds them."""
        return [jobs[start : start + self._at_once] for start in range(0, len(jobs), self._at_once)]

    def compute(
        self, stacks: Sequence[Sequence[Job]]
    ) -> Iterator[tuple[Sequence[Job], list[tuple[Message, State]]]]:
        """What the mechanism makes of each stack, one after another."""
        for stack in stacks:
            with model_randomness(self.noise, stack), within_memory(len(stack)):
                results = self.method.mechanism.run(stack, self.kit)
            yield stack, results

    def acknowledge(self, round: int) -> None:
        """The server has taken everything before this round into its durable state: forget those messages."""
        self.ledger.prune_before(round)
        self._done, self._asked = max(self._done, round), {}
        for name in self._opened:
            self.clients.pop(name, None)
        self._opened = []
        self._sent = {key: token for key, token in self._sent.items() if key[1] >= round}
        self._before = {key: state for key, state in self._before.items() if key[1] >= round}

    def _stored(self, b: Broadcast) -> Message:
        message = decode(self.ledger.message(self._sent[b.client, b.round]))
        assert isinstance(message, Noised | Sealed | Share | Summand)
        return replace(message, update=message.update.to(b.model.device))

    def events(self, broadcast: Broadcast) -> tuple[Release, ...]:
        """What the client would release if it followed this proposal."""
        asked, events = self._asked.get(broadcast.client, (None, ()))
        if asked is not broadcast:
            events = self.method.mechanism.events(self._as_asked(broadcast), self.kit)
            self._asked[broadcast.client] = broadcast, events
        return events

    def expected(self, broadcast: Broadcast) -> Expected:
        """What a server may expect of the answer, with this side's own count of participations."""
        return self.method.mechanism.expected(self._as_asked(broadcast), self.kit)

    def _as_asked(self, broadcast: Broadcast) -> Asked:
        client = self.clients[broadcast.client]
        return Asked(client.facts, client.plan, broadcast, self._participation(client, broadcast.round))

    def _objection(self, broadcast: Broadcast, usable: dict[int, bool]) -> Reason | None:
        """What is wrong with a proposal whatever the budget: a fixed list, and no data is looked at.

        `usable` remembers which models were found to be so: all clients of a round are sent the same one.
        """
        if broadcast.run != self.ledger.run_id:
            return Reason.UNKNOWN_RUN
        if broadcast.client not in self.clients:
            return Reason.UNKNOWN_CLIENT
        model = broadcast.model
        if id(model) not in usable:
            usable[id(model)] = model.shape == (int(self.kit.shared.sum()),) and finite(model)
        if not usable[id(model)]:
            return Reason.BAD_MODEL
        if self._keep.redoes and broadcast.round < self._done:
            return Reason.REPLAYED
        decision = broadcast.decision
        noises = (z for z in (decision.noise_multiplier, decision.signal_multiplier) if z is not None)
        fits = BOUNDS[0] <= decision.bound <= BOUNDS[1] and all(0 <= z <= BOUNDS[1] for z in noises)
        public = self.kit.public
        known = decision.kind is None or (public is not None and 0 <= decision.kind < len(public.scales))
        return None if fits and known and self._covers(decision) else Reason.BAD_BOUND

    def _covers(self, decision: Decision) -> bool:
        """Whether bounds by layer are there for each parameter, and for nothing else."""
        try:
            decision.rule(Flat()).check(self.kit.backend.layout.names)
        except UserError:
            return False
        return True

    def _participation(self, client: Client, round: int) -> int:
        return sum(r < round for r in client.rounds)

    def _reserve(
        self, events: Mapping[str, tuple[Release, ...]], answers: dict[str, Answer]
    ) -> dict[str, tuple[Token, ...]]:
        """Reserve for all in one transaction; whoever is refused sits out and the rest are asked again."""
        if not self.charges_here:
            return dict.fromkeys(events, ())
        asked = dict(events)
        while asked:
            try:
                tokens = iter(self._charge([e for name in asked for e in asked[name]]))
            except Refused as refused:
                for refusal in refused.refusals:
                    answers[refusal.client] = refusal
                    asked.pop(refusal.client, None)
                continue
            given = {name: tuple(next(tokens) for _ in asked[name]) for name in asked}
            for name in [name for name in asked if any(token.settled for token in given[name])]:
                answers[name] = Refusal(name, Reason.REPLAYED)
                del given[name]
            return given
        return {}

    def _charge(self, releases: Sequence[Release]) -> list[Token]:
        return self.ledger.reserve(releases, redo=self._keep.redoes)

    def _job(self, broadcast: Broadcast, tokens: tuple[Token, ...]) -> Job:
        client = self.clients[broadcast.client]
        participation = self._participation(client, broadcast.round)
        client.rounds.add(broadcast.round)
        return Job(
            facts=client.facts,
            plan=client.plan,
            records=client.records,
            validation=client.validation,
            state=self._before.get((broadcast.client, broadcast.round), client.state),
            broadcast=broadcast,
            participation=participation,
            seed=self._seed(broadcast),
            gate=self._gate(tokens),
        )

    def _gate(self, tokens: tuple[Token, ...]) -> ReleaseGate:
        gate = self._make_gate(tokens, self._reserve_one)
        return gate if self._watch is None else self._watch.client(gate)

    def _reserved_gate(self, tokens: tuple[Token, ...], reserve: Reserve) -> ReleaseGate:
        return ReservedGate(self.noise, tokens, reserve, self.rows)

    def _reserve_one(self, release: Release) -> Token | None:
        try:
            return self._charge([release])[0]
        except Refused:
            return None

    def _seed(self, broadcast: Broadcast) -> int:
        """For the order of minibatches, which needs no secrecy."""
        root = self.noise.seed if isinstance(self.noise, SimulatedNoise) else 0
        text = f"{root}/{broadcast.client}/{broadcast.round}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def settle(self, jobs: Sequence[Job], results: Sequence[tuple[Message, State]]) -> dict[str, Answer]:
        """What may be sent of what the mechanism made of these jobs: settled, and the clients' states written."""
        answers: dict[str, Answer] = {}
        settled: list[tuple[tuple[Token, ...], Message]] = []
        states: dict[tuple[str, int], State] = {}
        for job, (message, state) in zip(jobs, results, strict=True):
            name, round = job.facts.name, job.broadcast.round
            if self.charges_here and not job.gate.tokens:  # its filter refused the very first step
                answers[name] = Refusal(name, Reason.BUDGET_EXCEEDED)
                continue
            if isinstance(message, Noised):
                message = self.method.codec.apply(message)
            answers[name] = message
            self._write(name, round, state)
            states[name, round] = state
            if self.charges_here:
                settled.append((job.gate.tokens, message))
        settle(self.ledger, self._keep, settled)
        # Not before: where writing or settling fails the round is redone, from the state it began with.
        if self._keep is Retention.MESSAGES:
            self._sent |= {(m.client, m.round): tokens[0] for tokens, m in settled}
        for (name, round), state in states.items():
            client = self.clients[name]
            if self._keep.redoes and (state or client.state):
                self._before.setdefault((name, round), client.state)
            client.state = state
        return answers

    def _write(self, name: str, round: int, state: State) -> None:
        """The client's own state is on disk before its message may be sent."""
        if state and self._folder is not None:
            folder = self._folder / name
            folder.mkdir(parents=True, exist_ok=True)
            save_state(folder / f"{round:06d}.pt", state)
            for old in sorted(folder.glob("*.pt"))[:-2]:
                old.unlink()

    def _main_entries(self) -> list[Token]:
        """The stored messages; the further queries of a client's round are stored as empty ones beside it."""
        if self._keep is not Retention.MESSAGES or not self.charges_here:  # or it is the trusted server's
            return []
        return [
            token
            for token in self.ledger.outbox()
            if token.release.client in self.clients and self.ledger.message(token)
        ]

    def _recall(self) -> None:
        """After a restart: which rounds were reserved, and the state that the next one begins with."""
        self._sent = {(t.release.client, t.release.round): t for t in self._main_entries()}
        open_rounds = {(t.release.client, t.release.round) for t in self.ledger.unsettled()}

        def is_past(name: str, round: int) -> bool:
            """A round that is redone from its reservations begins with the state before it; see `Keep`."""
            return round < self._done if self._keep.redoes else (name, round) not in open_rounds

        for release in self.ledger.charges():
            if release.client in self.clients:
                self.clients[release.client].rounds.add(release.round)
        kept = self._folder.iterdir() if self._folder is not None and self._folder.is_dir() else ()
        for folder in (path for path in kept if path.name in self.clients):
            client = self.clients[folder.name]
            for path in sorted(folder.glob("*.pt"), reverse=True):
                if is_past(folder.name, int(path.stem)) and int(path.stem) in client.rounds:
                    client.state = load_state(path)
                    break


@contextmanager
def model_randomness(noise: NoiseSource, jobs: Sequence[Job]) -> Iterator[None]:
    """Layers that draw for themselves, such as dropout, draw from the noise source.

    Which draw an example gets depends on who else is in its batch, so an adversary must not know the draws;
    and torch's own generator starts every process with the same well-known seed.
    """
    key = NoiseKey(jobs[0].facts.name, jobs[0].broadcast.round, 0, "layers")
    with layers_draw_from(noise.bits(key), jobs[0].broadcast.model.device):
        yield


@contextmanager
def within_memory(clients: int) -> Iterator[None]:
    """What torch says of a GPU that is too small, in one line that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"{clients} clients' batches do not fit into the GPU's memory at once: begin again with fewer clients "
            'a round (run.per_round), smaller batches (method.batch), or run.device = "cpu"'
        ) from None
