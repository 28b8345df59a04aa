"""The client side: check a proposal, reserve, compute, settle, answer.

The same code serves a simulator that holds every client and a silo that holds one. Nothing is computed before the
ledger has charged it, and nothing is sent before the ledger has stored it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from modicum.core.door import Door, DoorWatch, ReservedDoor
from modicum.core.messages import Broadcast, Expected, Noised, encode, finite
from modicum.core.parts import Batch, ClientFacts, Frame, Job, Method, State
from modicum.core.store import load_state, save_state
from modicum.privacy.budgets import Reason, Refusal, Refused
from modicum.privacy.events import Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import NoiseKey, NoiseSource, SimulatedNoise
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.token import Token

DoorMaker = Callable[[str, tuple[Token, ...]], Door]

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
    """Answers proposals on behalf of one or many clients that share a ledger."""

    def __init__(
        self,
        method: Method,
        frame: Frame,
        clients: Sequence[Client],
        ledger: Ledger,
        noise: NoiseSource,
        folder: Path | None = None,
        at_once: int = 1,
        door: DoorMaker | None = None,
        watch: DoorWatch | None = None,
    ) -> None:
        self.method, self.frame, self.ledger, self.noise = method, frame, ledger, noise
        self.clients = {client.facts.name: client for client in clients}
        self._folder = folder
        self._at_once = at_once
        self._make_door = door or self._reserved_door
        self._watch = watch
        self._sent: dict[tuple[str, int], Token] = {}
        self._recall()

    @property
    def charges_here(self) -> bool:
        """Behind a trusted server it is the server that releases and is charged."""
        return self.method.mechanism.spec.view.senders_add_noise

    def answer(self, broadcasts: Sequence[Broadcast]) -> dict[str, bytes | Refusal]:
        """Each client's message, as bytes ready to send, or why it refuses."""
        answers: dict[str, bytes | Refusal] = {}
        fresh = []
        for b in broadcasts:
            reason = self._objection(b)
            if reason is not None:
                answers[b.client] = Refusal(b.client, reason)
            elif (b.client, b.round) in self._sent:  # a retry gets the stored message, byte for byte
                answers[b.client] = self.ledger.message(self._sent[b.client, b.round])
            else:
                fresh.append(b)
        tokens = self._reserve({b.client: self.events(b) for b in fresh}, answers)
        jobs = [self._job(b, tokens[b.client]) for b in fresh if b.client in tokens]
        for start in range(0, len(jobs), self._at_once):
            answers.update(self._compute(jobs[start : start + self._at_once]))
        return answers

    def acknowledge(self, round: int) -> None:
        """The server has taken everything before this round into its durable state: forget those messages."""
        self.ledger.prune_before(round)
        self._sent = {key: token for key, token in self._sent.items() if key[1] >= round}

    def events(self, broadcast: Broadcast) -> tuple[Release, ...]:
        client = self.clients[broadcast.client]
        return self.method.mechanism.events(
            client.facts, client.plan, self.frame, broadcast, self._participation(client, broadcast.round)
        )

    def expected(self, broadcast: Broadcast) -> Expected:
        """What a server may expect of the answer, with this side's own count of participations."""
        client = self.clients[broadcast.client]
        return self.method.mechanism.expected(
            client.facts, client.plan, self.frame, broadcast, self._participation(client, broadcast.round)
        )

    def _objection(self, broadcast: Broadcast) -> Reason | None:
        """What is wrong with a proposal whatever the budget: a fixed list, and no data is looked at."""
        if broadcast.run != self.ledger.run_id:
            return Reason.UNKNOWN_RUN
        if broadcast.client not in self.clients:
            return Reason.UNKNOWN_CLIENT
        if broadcast.model.shape != (int(self.frame.shared.sum()),) or not finite(broadcast.model):
            return Reason.BAD_MODEL
        decision = broadcast.decision
        noises = (z for z in (decision.noise_multiplier, decision.signal_multiplier) if z is not None)
        usable = BOUNDS[0] <= decision.bound <= BOUNDS[1] and all(0 <= z <= BOUNDS[1] for z in noises)
        return None if usable else Reason.BAD_BOUND

    def _participation(self, client: Client, round: int) -> int:
        return sum(r < round for r in client.rounds)

    def _reserve(
        self, events: Mapping[str, tuple[Release, ...]], answers: dict[str, bytes | Refusal]
    ) -> dict[str, tuple[Token, ...]]:
        """Reserve for all in one transaction; whoever is refused sits out and the rest are asked again."""
        if not self.charges_here:
            return dict.fromkeys(events, ())
        asked = dict(events)
        while asked:
            try:
                tokens = iter(self.ledger.reserve([e for name in asked for e in asked[name]]))
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

    def _job(self, broadcast: Broadcast, tokens: tuple[Token, ...]) -> Job:
        client = self.clients[broadcast.client]
        participation = self._participation(client, broadcast.round)
        client.rounds.add(broadcast.round)
        return Job(
            facts=client.facts,
            plan=client.plan,
            records=client.records,
            validation=client.validation,
            state=client.state,
            broadcast=broadcast,
            participation=participation,
            seed=self._seed(broadcast),
            door=self._door(broadcast.client, tokens),
        )

    def _door(self, client: str, tokens: tuple[Token, ...]) -> Door:
        door = self._make_door(client, tokens)
        return door if self._watch is None else self._watch.client(door)

    def _reserved_door(self, client: str, tokens: tuple[Token, ...]) -> Door:  # noqa: ARG002
        return ReservedDoor(self.noise, tokens, reserve=self._reserve_one)

    def _reserve_one(self, release: Release) -> Token | None:
        try:
            return self.ledger.reserve([release])[0]
        except Refused:
            return None

    def _seed(self, broadcast: Broadcast) -> int:
        """For the order of minibatches, which needs no secrecy."""
        root = self.noise.seed if isinstance(self.noise, SimulatedNoise) else 0
        text = f"{root}/{broadcast.client}/{broadcast.round}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _compute(self, jobs: Sequence[Job]) -> dict[str, bytes | Refusal]:
        with self._model_randomness(jobs):
            results = self.method.mechanism.run(jobs, self.frame)
        sent: dict[str, bytes | Refusal] = {}
        settled: list[tuple[Token, bytes]] = []
        states: dict[str, State] = {}
        messages: dict[tuple[str, int], Token] = {}
        for job, (message, state) in zip(jobs, results, strict=True):
            name, round = job.facts.name, job.broadcast.round
            if self.charges_here and not job.door.tokens:  # its filter refused the very first step
                sent[name] = Refusal(name, Reason.BUDGET_EXCEEDED)
                continue
            if isinstance(message, Noised):
                message = self.method.codec.apply(message)
            blob = sent[name] = encode(message)
            self._write(name, round, state)
            states[name] = state
            if self.charges_here:
                first, *rest = job.door.tokens
                settled += [(first, blob), *((token, b"") for token in rest)]
                messages[name, round] = first
        self.ledger.settle_many(settled)
        # Not before: where writing or settling fails the round is redone, from the state it began with.
        self._sent |= messages
        for name, state in states.items():
            self.clients[name].state = state
        return sent

    @contextmanager
    def _model_randomness(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Layers that draw for themselves, such as dropout, draw from a seed of the noise source.

        Which draw an example gets depends on who else is in its batch, so an adversary must not know the draws;
        and torch's own generator starts every process with the same well-known seed.
        """
        key = NoiseKey(jobs[0].facts.name, jobs[0].broadcast.round, 0, "layers")
        model = jobs[0].broadcast.model
        with torch.random.fork_rng(devices=[model.device] if model.is_cuda else []):
            torch.manual_seed(int(self.noise.uniform(key, 1)[0] * 2**53))
            yield

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
        return [
            token
            for token in self.ledger.outbox()
            if token.release.client in self.clients and self.ledger.message(token)
        ]

    def _recall(self) -> None:
        """After a restart: which rounds were reserved, and the state after the last one that was settled."""
        self._sent = {(t.release.client, t.release.round): t for t in self._main_entries()}
        open_rounds = {(t.release.client, t.release.round) for t in self.ledger.unsettled()}
        for name, client in self.clients.items():
            client.rounds = {release.round for release in self.ledger.spent(name)}
            if self._folder is None:
                continue
            for path in sorted((self._folder / name).glob("*.pt"), reverse=True):
                if (name, int(path.stem)) not in open_rounds and int(path.stem) in client.rounds:
                    client.state = load_state(path)
                    break
