"""The one loop: propose, exchange, advance, evaluate in public, observe, record, checkpoint, acknowledge.

Simulation, rehearsal and deployment differ in the carrier, which takes a proposal to clients and brings back what
may be seen of their answers, and in what is kept; every setting means the same in all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from modicum.core.facts import ClientFacts
from modicum.core.messages import Opened, mean_metrics
from modicum.core.parts import Backend, Batch, State
from modicum.core.store import load_state, save_state
from modicum.federation.evaluation import accuracy_by_client, evaluate, own_model
from modicum.federation.experiment import Prepared
from modicum.federation.records import MetricsFile, RoundRecord
from modicum.federation.run_folder import RunFolder
from modicum.federation.server import Proposal, Server


@dataclass(frozen=True)
class Exchange:
    """What came of asking a round's cohort."""

    opened: Opened | None
    answered: int
    refused: Mapping[str, str]  # who refused, and why
    retired: Mapping[str, str]  # those of them who refuse every later round as well
    impossible: Mapping[str, str] = field(default_factory=dict)
    void: str = ""  # why secure aggregation gave no sum
    traffic: Mapping[str, float] = field(default_factory=dict)  # seconds and bytes, where messages travel
    parties: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # the same of each client


class Carrier(Protocol):
    """Takes proposals to clients, wherever they are, and brings back what the mechanism's view lets be seen."""

    def exchange(self, proposal: Proposal) -> Exchange:
        """Ask the round's cohort, and open what comes back as far as the view allows."""

    def acknowledge(self, round: int) -> None:
        """Everything before this round is in the server's durable state: messages of it may be forgotten."""

    def reserved(self) -> float:
        """Share of the planned releases that is reserved so far, in the mean over clients (R3)."""

    def left(self) -> Mapping[str, float]:
        """Share of each client's plan or filter that may still be reserved; public, like what was proposed."""

    def stock(self) -> Mapping[str, tuple[float, ...]]:
        """The same share of each kind of noise on its own, where plans hold several (R11); public as well."""


def reserved_by_budget(clients: Sequence[ClientFacts], left: Mapping[str, float]) -> dict[str, float]:
    """Share of plan or filter that is reserved, in the mean over the clients that grant the same ε (R3).

    A share and no ε: what was spent so far is no guarantee. Who grants ∞ has nothing that could be reserved.
    """
    shares: dict[float, list[float]] = {}
    for facts in clients:
        if facts.name in left and math.isfinite(facts.budget):
            shares.setdefault(facts.budget, []).append(1 - left[facts.name])
    return {f"{budget:g}": statistics.fmean(group) for budget, group in sorted(shares.items())}


class Evaluation:
    """How good the model is: on public records, which policies may see, and on others, which a simulator can.

    `states` gives what clients keep, where they are at hand; `held_out` names further records of each client.
    """

    def __init__(
        self,
        server: Server,
        backend: Backend,
        data: Prepared,
        every: int,
        *,
        ground_truth: bool = True,
        states: Callable[[], Mapping[str, State]] = dict,
        held_out: Mapping[str, tuple[Batch, ...]] | None = None,
    ) -> None:
        self.server, self.backend, self.data, self.every = server, backend, data, every
        self._ground_truth, self._states, self._held_out = ground_truth, states, held_out

    @property
    def model(self) -> Tensor:
        """The whole parameter vector: what the server has, and the initial values of personal parameters."""
        return self.server.full_model(self.data.first)

    def public(self) -> dict[str, float]:
        """Accuracy and loss on public records with the task's labels; empty where there are none."""
        return {} if self.data.proxy is None else evaluate(self.backend, self.model, self.data.proxy)

    def by_client(self, held_out: tuple[Batch, ...]) -> dict[str, float]:
        """Accuracy of each client's own model, personalised or not, on records of its own."""
        if not self._ground_truth:
            return {}
        model, shared, found = self.model, self.server.kit.shared, dict[str, float]()
        for (name, state), records in zip(self._states().items(), held_out, strict=True):
            if len(records):  # one model at a time: many clients' own models do not fit into memory
                own = {name: own_model(model, shared, state)}
                found |= accuracy_by_client(self.backend, own, (records,))
        return found

    def simulated(self, round: int) -> dict[str, float]:
        """Ground truth, in every round that is due and after the last one."""
        due = self.server.finished or (round + 1) % self.every == 0
        if not due or not self._ground_truth:
            return {}
        found = {}
        if len(self.data.test):
            found = {f"test_{k}": v for k, v in evaluate(self.backend, self.model, self.data.test).items()}
        for name, records in self._each_client().items():
            if own := self.by_client(records):
                found[f"{name}_accuracy"] = statistics.fmean(own.values())
        return found

    def _each_client(self) -> Mapping[str, tuple[Batch, ...]]:
        if self._held_out is not None:
            return self._held_out
        personal = len(self.data.test) and any(self._states().values())
        return {"personalised": self.data.client_test} if personal else {}


class Folder:
    """Keeps a run on disk: a line and a checkpoint a round, from which it continues after a crash."""

    def __init__(self, files: RunFolder, server: Server) -> None:
        self.checkpoint: Path = files.checkpoint
        if self.checkpoint.exists():
            server.restore(load_state(self.checkpoint))
        self.metrics = MetricsFile(files.metrics, server.state.round)

    def keep(self, record: RoundRecord, server: Server) -> None:
        """The round's line first, then the checkpoint: see `MetricsFile`."""
        self.metrics.append(record)
        save_state(self.checkpoint, server.state.to_dict())


class Rounds:
    """Plays the rounds of a server over a carrier. Without an evaluation nothing is measured, without a folder
    nothing is kept."""

    def __init__(
        self,
        server: Server,
        carrier: Carrier,
        evaluation: Evaluation | None = None,
        folder: Folder | None = None,
    ) -> None:
        self.server, self.carrier, self.evaluation, self.folder = server, carrier, evaluation, folder

    def __iter__(self) -> Iterator[RoundRecord]:
        """Play what is left, round by round."""
        while not self.server.finished:
            yield self.step()

    def step(self) -> RoundRecord:
        """One round."""
        proposal = self.server.propose()
        return self.conclude(proposal, self.carrier.exchange(proposal))

    def conclude(self, proposal: Proposal, done: Exchange) -> RoundRecord:
        """The server's half of a round, once the answers are in."""
        server, opened = self.server, done.opened
        moved = server.advance(opened, done.retired)
        public = {} if self.evaluation is None else self.evaluation.public()
        stock = self.carrier.stock() if server.public.stock else {}
        left = self.carrier.left()
        server.observe(proposal, opened, public, left, stock)
        secret = server.method.mechanism.cohort_rate is not None  # who was drawn, and how many, stays untold (R5)
        names = proposal.decisions if secret else proposal.asked
        record = RoundRecord(
            round=proposal.round,
            bounds={name: proposal.decisions[name].bound for name in names},
            answered=None if secret else done.answered,
            refused=done.refused,
            abandoned=not moved,
            reserved=self.carrier.reserved(),
            public=public,
            released=mean_metrics(opened),
            simulated={} if self.evaluation is None else self.evaluation.simulated(proposal.round),
            impossible={} if secret else done.impossible,
            void=done.void,
            traffic=done.traffic,
            reserved_by_budget=reserved_by_budget(server.public.clients, left),
            parties=done.parties,
        )
        if self.folder is not None:
            self.folder.keep(record, server)
        self.carrier.acknowledge(server.state.round)
        return record
