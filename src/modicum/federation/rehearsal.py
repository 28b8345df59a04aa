"""A method played through in memory, without files: for public simulation and for benchmarks.

The loop, clients and guards of `Simulation`, and the same law of the noise; nothing is durable, so it serves no
deployment. All clients of a round are computed at once, and noise is drawn where the model lives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.core import integers
from modicum.core.memory import keep_pages
from modicum.core.messages import Opened, ReleasedSum
from modicum.core.own_rows import OwnRows
from modicum.core.parts import Backend, Batch, Job, State
from modicum.core.release_gate import SERVER, ReleaseGate, RowsOf, add_rows, correlated_blocks, drawn, in_turn
from modicum.core.round_state import Collector, RoundState
from modicum.core.rows import NoiseRows
from modicum.data.check import refuse_population
from modicum.federation.clients import Clients, Reserve
from modicum.federation.correlate import rows_for
from modicum.federation.evaluation import Evaluation
from modicum.federation.experiment import Experiment, Federation, Prepared
from modicum.federation.in_process import InProcess, Results
from modicum.federation.records import RoundRecord
from modicum.federation.retention import Retention
from modicum.federation.rounds import Rounds
from modicum.federation.secure_sums import collect_integers
from modicum.federation.server import TrustedLedger
from modicum.federation.setup import set_up
from modicum.privacy.events import Cyclic, Poisson, Release, Shuffled
from modicum.privacy.ledger.memory import MemoryLedger
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.views import KnownTo
from modicum.public.proxy import bootstrap


@dataclass(frozen=True)
class RehearsedNoise:
    """A gate for rehearsals: noise of each release from its own seed, on the tensor's own device."""

    seed: int
    held: list[Token] = field(default_factory=list)
    ask: Reserve | None = None
    rows: NoiseRows | None = None  # of a trusted server's correlated noise
    own: RowsOf | None = None  # of clients' own

    def opened_by(self, tokens: Sequence[Token], reserve: Reserve) -> ReleaseGate:
        """The same gate for one client and round."""
        return replace(self, held=list(tokens), ask=reserve)

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(self.held)

    def reserve(self, release: Release) -> bool:
        if any(token.release is release or token.release == release for token in self.held):
            return True
        token = None if self.ask is None else self.ask(release)
        if token is not None:
            self.held.append(token)
        return token is not None

    def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
        if isinstance(release.sampler, Shuffled):
            turn, batch = divmod(step, release.sampler.batches)
            seed = counter_seed(self.seed, release.client, release.round, turn, "pass")
            order = torch.randperm(records, generator=torch.Generator().manual_seed(seed))
            return torch.tensor_split(order, release.sampler.batches)[batch]
        if isinstance(release.sampler, Cyclic):
            return in_turn(release, step, records)
        if not isinstance(release.sampler, Poisson) or release.sampler.known_to is not KnownTo.CLIENT:
            return torch.arange(records)
        seed = counter_seed(self.seed, release.client, release.round, step, "coins")
        generator = torch.Generator().manual_seed(seed)
        coins = torch.rand(records, generator=generator) < release.sampler.rate

        def uniform(size: int) -> NDArray[np.float64]:
            return torch.rand(size, generator=generator, dtype=torch.float64).numpy()

        return drawn(release.sampler, coins.numpy(), present, uniform)

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if release.integers is not None:
            return integers.released_alone(release, step, sums, SimulatedNoise(self.seed))
        if release.correlated is not None:
            return add_rows(release, step, sums, self.own)
        stds = {block.name: block.noise_std for block in release.blocks}
        return {
            name: self._noised(value, stds[name], release.client, release.round, step, name)
            for name, value in sums.items()
        }

    def release_integers(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Tensor:
        return torch.from_numpy(integers.noised(release, step, sums, SimulatedNoise(self.seed)))

    def release_sum(
        self, events: Mapping[str, tuple[Release, ...]], round: int, sums: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        blocks = [block for es in events.values() for e in es for block in e.blocks]
        stds = {name: max(b.noise_std for b in blocks if b.name == name) for name in sums}
        correlated = correlated_blocks(events, self.rows)
        return {
            name: value + stds[name] * self.rows.row(name, round, value)
            if self.rows is not None and name in correlated
            else self._noised(value, stds[name], SERVER, round, 0, name)
            for name, value in sums.items()
        }

    def _noised(self, value: Tensor, std: float, *key: object) -> Tensor:
        if not std:
            return value
        generator = torch.Generator(value.device).manual_seed(counter_seed(self.seed, *key))
        return torch.empty_like(value).normal_(0.0, std, generator=generator).add_(value)


def counter_seed(*key: object) -> int:
    """A seed for torch's generators that is a function of a key, never of what was drawn before."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8, person=b"modicum.seeds").digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Rehearsed(RoundRecord):
    """One round of a rehearsal."""

    norm: float = 0.0  # of the released mean update, noise included


class Measured(InProcess):
    """Keeps the last round's mean update, where a sum is seen."""

    mean: Tensor | None = None

    def open(self, state: RoundState, collected: Collector) -> Opened | None:
        opened = super().open(state, collected)
        self.mean = opened.update if isinstance(opened, ReleasedSum) else None
        return opened


class Rehearsal:
    """Plays an experiment round by round. `prepared` may be shared by runs on the same data and model."""

    def __init__(self, experiment: Experiment, prepared: Prepared | None = None) -> None:
        refuse_population(experiment.federation.data, "a rehearsal")
        self.experiment, noise = experiment, SimulatedNoise(experiment.seed)
        if experiment.device == "cpu":
            keep_pages()
        made = set_up(experiment, noise, prepared)
        self.method, self.data, self.plans, self.kit = made.method, made.data, made.plans, made.kit
        self.backend: Backend = made.kit.backend
        self.facts = {f.name: f for f in made.facts}
        self.server = made.server("rehearsal")
        own = OwnRows(noise, self.plans.values())
        self.gate = RehearsedNoise(experiment.seed, rows=rows_for(self.method.mechanism, noise), own=own)
        ledger = MemoryLedger("rehearsal", self.plans.values())
        self.clients = Clients(
            self.method,
            self.kit,
            made.clients(),
            ledger,
            noise,
            at_once=len(self.facts),
            gate=lambda tokens, reserve: self.gate.opened_by(tokens, reserve),
            keep=Retention.NOTHING,
        )
        central = not self.method.mechanism.spec.view.senders_add_noise
        trusted = (
            TrustedLedger(ledger, noise, keep=Retention.NOTHING, gate=lambda _: self.gate) if central else None
        )
        sums = collect_integers(made, "rehearsal")
        self.carrier = Measured(self.server, self.clients, ledger, trusted=trusted, integers=sums)
        self.evaluation = Evaluation(
            self.server,
            self.backend,
            self.data,
            experiment.evaluate_every,
            states=lambda: self.states,
            held_out={"personalised": self.data.client_test, "validation": self.data.validation},
        )
        self._rounds = Rounds(self.server, self.carrier, self.evaluation)

    def rounds(self) -> Iterator[Rehearsed]:
        """Play what is left, round by round."""
        while not self.server.finished:
            yield self.step()

    def step(self) -> Rehearsed:
        """One round."""
        before = self.server.state.model
        return self._told(self._rounds.play(), before)

    def begin(self) -> tuple[RoundState, Sequence[Job]]:
        """What the server proposes, charged and not yet computed, and what each client is asked for."""
        state, stacks = self._rounds.begin()
        return state, [job for stack in stacks for job in stack]

    def finish(self, state: RoundState, jobs: Sequence[Job], results: Results) -> Rehearsed:
        """The rest of a round that `begin` began, with what the mechanism made of its jobs."""
        self._rounds.add(state, self.carrier.settle(state, jobs, results))
        return self._told(self._rounds.conclude(state), state.model)

    def _told(self, record: RoundRecord, before: Tensor) -> Rehearsed:
        mean = self.carrier.mean
        moved = self.server.state.model - before if mean is None else mean
        return Rehearsed(**vars(record), norm=moved.norm().item())

    @property
    def states(self) -> dict[str, State]:
        """What each client keeps for itself."""
        return {name: client.state for name, client in self.clients.clients.items()}

    @property
    def model(self) -> Tensor:
        """The whole parameter vector: what the server has, and the initial values of personal parameters."""
        return self.evaluation.model

    def accuracies(self, held_out: tuple[Batch, ...]) -> dict[str, float]:
        """Each client's own model, personalised or not, on held-out records of its own."""
        return self.evaluation.by_client(held_out)


def rehearse(experiment: Experiment, prepared: Prepared | None = None) -> tuple[Rehearsed, ...]:
    """All rounds of an experiment."""
    return tuple(Rehearsal(experiment, prepared).rounds())


def stand_in(experiment: Experiment, k: int) -> Experiment:
    """The same experiment on a federation of public records alone, another for each k."""
    data = bootstrap(experiment.federation.data, k)
    federation = Federation(data, experiment.federation.budgets)
    return replace(experiment, federation=federation, seed=k, evaluate_every=experiment.rounds)
