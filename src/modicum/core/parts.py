"""The parts that a method is made of, as protocols.

    local training · clipping policy · mechanism · aggregation      (+ a codec after the gate)

Each is a frozen value; what changes during a run is a state that the part returns and the engine keeps. States
are dictionaries of plain numbers, strings, lists and tensors, so that a checkpoint can hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from modicum.core.clips import Clip
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import ClientFacts, Metric, PublicFacts
from modicum.core.integers import Agreed
from modicum.core.layout import Layout
from modicum.core.messages import Broadcast, Decision, Expected, Message, Noised, Opened, ReleasedSum
from modicum.core.needs import check_composition
from modicum.core.records import each, first_leaf
from modicum.core.release_gate import ReleaseGate
from modicum.core.round_state import Collector, RoundState
from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import Variant
from modicum.tasks import CLASSIFICATION, Task

if TYPE_CHECKING:
    from modicum.core.optimisers import Optimiser

State = dict[str, Any]

PERSONALISED = "personalised"
"""Where a client's state keeps its own whole model, if its training makes one; it never leaves the client."""


@dataclass(frozen=True)
class Observation:
    """What a policy sees of a finished round (or, at a client, of a finished local step): releases, no more."""

    round: int
    opened: Opened | None  # None: the round was abandoned
    decisions: Mapping[str, Decision]
    public: Mapping[str, float] = field(default_factory=dict)  # evaluation of the model on public data
    step: int = 0
    # Share of each client's plan or filter that is not yet reserved: 1 before its first release (R2). Public: a
    # function of plans and reservations, never of what was released in the end. Empty for a local step.
    left: Mapping[str, float] = field(default_factory=dict)
    # The same share of each planned kind on its own, in the plan's order (R11); empty where there is one kind.
    stock: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def signal(self, name: str) -> tuple[float, float] | None:
        """Mean of a paid signal over all who sent it, and its variance; None when nothing was received."""
        if self.opened is None:
            return None
        if isinstance(self.opened, ReleasedSum):
            return self.opened.signals[name], self.opened.facts.signal_variance[name]
        if not self.opened:
            return None
        weights = [1 / max(r.facts.signal_variance[name], 1e-12) for r in self.opened]
        total = sum(weights)
        mean = sum(w * r.signals[name] for w, r in zip(weights, self.opened, strict=True)) / total
        return mean, 1 / total


class Scope(StrEnum):
    """How often a policy decides: once a round, or anew before each local step."""

    ROUND = "round"
    STEP = "step"


class Place(StrEnum):
    """Where a policy decides: at the server, or at each client from its own releases."""

    SERVER = "server"
    CLIENT = "client"


class SignalName(StrEnum):
    """Signals about clipping that a policy can buy in the same query as the gradient or update."""

    CLIP_BIT = "clip-bit"  # 1[‖g‖ ≤ C] − ½
    SQUARE_NORM = "square-norm"  # min(‖g‖, C)²/C² − ½


SIGNAL_BOUND = 0.5
CLASS_SUMS, CLASS_COUNTS = "class-sums", "class-counts"  # blocks of a release of sufficient statistics


@dataclass(frozen=True)
class Signal:
    """A signal and its price: its noise multiplier is `ratio` times that of the whole query."""

    name: SignalName
    ratio: float = 10.0


@runtime_checkable
class Policy(Protocol):
    """Chooses public numbers from public and released values only."""

    @property
    def scope(self) -> Scope:
        """How often it decides."""

    @property
    def place(self) -> Place:
        """Where it decides."""

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What it buys beside the gradient or update, in the same query."""

    def init(self, public: PublicFacts) -> State:
        """Its state before the first round.

        Args:
            public: What is known before the first round.

        Returns:
            Its own state.
        """

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        """A bound, and maybe a noise multiplier, for each of these clients in this round.

        Args:
            state: Its own.
            round: From 0 on.
            clients: Who is invited.

        Returns:
            A decision for each of them.
        """

    def observe(self, state: State, observed: Observation) -> State:
        """The state after a round, or a local step.

        Args:
            state: From before; it is not changed.
            observed: What was released, with the noise in it.

        Returns:
            The next state.
        """


@dataclass(frozen=True)
class Batch:
    """Records that enter one step: a tensor, or several by name; the first dimension of each is the record.

    Targets hold `y` and whatever else the loss needs. A blank keeps its row and counts for nothing: weight 0 in
    sums, left out of signals, counts and metrics (R16).
    """

    x: Any = field(repr=False)  # a log shows no record
    targets: Mapping[str, Tensor] = field(repr=False)
    present: Tensor | None = field(default=None, repr=False)  # (rows,) False for a blank; None: there is none
    part_of: int | None = None  # the most rows of the step that this pass is a part of; None: it is all of it

    def __len__(self) -> int:
        return int(first_leaf(self.x).shape[0])

    @property
    def device(self) -> torch.device:
        """Where the records are."""
        found: torch.device = first_leaf(self.x).device
        return found

    def take(self, index: Tensor) -> Batch:
        """The rows of these numbers, on the batch's own device."""
        index = index.to(self.device)
        return Batch(
            each(lambda t: t.index_select(0, index), self.x),
            {name: t.index_select(0, index) for name, t in self.targets.items()},
            None if self.present is None else self.present.index_select(0, index),
        )

    def blanked(self, present: Tensor) -> Batch:
        """The same rows with zeros, at weight 0, in place of those that are not present."""
        present = present.to(self.device)
        both = present if self.present is None else present & self.present
        return Batch(
            each(lambda t: _kept(t, both), self.x),
            {name: _kept(t, both) for name, t in self.targets.items()},
            both,
        )

    def with_targets(self, targets: Mapping[str, Tensor]) -> Batch:
        """The same records with other targets; what is a blank stays one."""
        return Batch(self.x, targets, self.present)

    @property
    def real(self) -> Batch:
        """The rows that are no blanks, for what is counted and never leaves by itself."""
        return self if self.present is None else replace(self.take(self.present.nonzero().flatten()), present=None)


def _kept(t: Tensor, present: Tensor) -> Tensor:
    return torch.where(present.view(-1, *(1,) * (t.dim() - 1)), t, t.new_zeros(()))


class Losses(Protocol):
    """Loss of each example; must not mix examples."""

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor: ...


class Backend(Protocol):
    """Computes with stacked parameters: row i of `theta` is client i's model. Loop and fused agree."""

    @property
    def layout(self) -> Layout:
        """How parameters lie in a row of `theta`."""

    def outputs(self, theta: Tensor, x: Any) -> Tensor:
        """Outputs of one model (a flat vector) on records, without gradients."""

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        """Gradient of each client's mean loss, one row a client; zero for an empty batch."""

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        """Sum of clipped per-example gradients, one row a client, and the norms before clipping (private!)."""


@runtime_checkable
class Descends(Protocol):
    """A backend that need not store gradients for plain descent."""

    def descend(self, theta: Tensor, steps: Sequence[Sequence[Batch]], losses: Losses, rate: float) -> Tensor:
        """theta − rate · gradients, for each step's batches in turn; a new tensor."""


class LocalTraining(Protocol):
    """What a client optimises. It never sends anything."""

    @property
    def optimiser(self) -> Optimiser:
        """What turns gradients into local steps."""

    @property
    def by_record(self) -> bool:
        """Whether a record's loss depends on that record and on releases alone, as record-level clipping needs."""

    def targets(self, records: Batch, state: State, backend: Backend) -> dict[str, Tensor]:
        """Per-record targets for this round: labels, and for instance a teacher's outputs.

        Args:
            records: The client's.
            state: The client's own.
            backend: Computes outputs of a model.

        Returns:
            Targets by name, one row a record.
        """

    def losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Loss of each record; it must not mix records.

        Args:
            outputs: Of the model.
            targets: As `targets` gave them.

        Returns:
            One number a record.
        """

    def finish(self, records: Batch, state: State, trained: Tensor, backend: Backend) -> State:
        """The client's own state after the round.

        Args:
            records: The client's.
            state: The client's own, from before.
            trained: Its full local model: copy what is kept.
            backend: Computes outputs of a model.

        Returns:
            The next state.
        """


class ModelWrapper(Protocol):
    """May add or compress layers, and says which parameters travel; the rest never leave the client."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model that is trained in place of the given one."""

    def shared(self, name: str) -> bool:
        """Whether the parameter of this name travels."""


@dataclass(frozen=True)
class Plain:
    """The model as it is; every parameter is shared unless its name starts with one of `personal`."""

    personal: tuple[str, ...] = ()

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def shared(self, name: str) -> bool:
        return not name.startswith(self.personal) if self.personal else True


@dataclass(frozen=True)
class ClientKit:
    """What every client of a run is given, the same for all."""

    backend: Backend
    training: LocalTraining
    policy: Policy
    shared: Tensor  # mask over the parameter vector: what a message carries
    metrics: tuple[Metric, ...] = ()
    public: PublicFacts | None = None  # for policies that decide at the client
    integers: Agreed | None = None  # the terms of integer noise behind a sum; None: there is none
    task: Task = CLASSIFICATION


@dataclass(frozen=True)
class Asked:
    """A proposal as it comes to one client, and what is public of that client."""

    facts: ClientFacts
    plan: PrivacyPlan  # that the client agreed to
    broadcast: Broadcast
    participation: int  # how many rounds this client has taken part in before

    def by(self, decision: Decision) -> Asked:
        """The same with a decision of the client's own."""
        return replace(self, broadcast=replace(self.broadcast, decision=decision))

    @classmethod
    def alone(cls, facts: ClientFacts, plan: PrivacyPlan, number: int, decision: Decision) -> Asked:
        """Of who releases in a program of its own, for the time of this number."""
        return cls(facts, plan, Broadcast("", number, facts.name, decision, torch.empty(0)), number)


@dataclass(frozen=True)
class Job(Asked):
    """Everything one client needs for one round. `gate` is the only way out."""

    records: Batch
    validation: Batch
    state: State
    seed: int  # for what needs no secrecy: the order of minibatches
    gate: ReleaseGate


class Mechanism(Protocol):
    """Where clipping and noise happen, hence what is charged to whom."""

    @property
    def spec(self) -> PrivacySpec:
        """Unit, adjacency, view and δ of what it claims."""

    @property
    def purpose(self) -> str:
        """The name of the main block, under which the plan lists the training releases."""

    @property
    def individuals(self) -> bool:
        """Whether each client's message may be seen on its own."""

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        """What the client agrees to release in the whole run, with the noise that its budget asks for.

        Args:
            facts: What is public about the client, its budget included.
            metrics: That the client pays for beside the training.

        Returns:
            The plan, fixed for the whole run.
        """

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        """What the client would release if it followed this proposal; reserved before data is touched.

        Args:
            asked: The proposal, and the client that it comes to.
            kit: Parts and model of the run.

        Returns:
            Releases to reserve before data is touched.
        """

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        """What the client's answer to this proposal can be, and the noise in it. Nothing reported enters (R14).

        Args:
            asked: The proposal, and the client that it comes to.
            kit: Parts and model of the run.

        Returns:
            Limits that the server checks an answer by, and the noise in it.
        """

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        """The client half, for several clients at once; each result depends on its own job alone.

        Args:
            jobs: One a client: its records, state, proposal and gate.
            kit: Parts and model of the run.

        Returns:
            A message and the next state for each job, in their order.
        """

    def collect(self, state: RoundState) -> Collector:
        """The server half: takes the round's messages as they come, and opens what may be seen of them.

        Args:
            state: Of the round.

        Returns:
            What takes the messages.
        """


@runtime_checkable
class OpensIntegers(Protocol):
    """A mechanism whose messages can be integers with a share of noise."""

    def open_integers(self, total: Integers, survivors: Sequence[str], state: RoundState) -> ReleasedSum | None:
        """The server half, given the modular sum of the survivors' integers. None when the round is void."""


@runtime_checkable
class OnLattice(Protocol):
    """A mechanism that can draw its noise on a lattice; `integers` says whether it does."""

    @property
    def integers(self) -> bool:
        """Whether noise is drawn on the lattice now."""

    @property
    def takes_integers(self) -> bool:
        """Whether these settings allow it: whole batches, noise that the plan fixes, and senders who add it."""

    def on_integers(self, variant: Variant) -> Mechanism:
        """The same with integer noise; behind a sum, with what is to stand behind secure aggregation."""


class Aggregation(Protocol):
    """Post-processing of releases into the next model (R7)."""

    @property
    def needs_individuals(self) -> bool:
        """Whether it can do nothing with a sum alone."""

    def init(self, public: PublicFacts) -> State:
        """Its state before the first round.

        Args:
            public: What is known before the first round.

        Returns:
            Its own state.
        """

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        """The next model.

        Args:
            state: Its own, from the round before.
            model: Of this round.
            opened: What was released: messages, or their sum.
            evaluate: Tells how good any model is on public records; None where there are none.

        Returns:
            The next model, and the next state.
        """


class Codec(Protocol):
    """A map after the gate, such as thresholding or compression: post-processing, so it is free."""

    def apply(self, noised: Noised) -> Noised:
        """The message as it is sent; shape and precision of the update stay."""


@dataclass(frozen=True)
class Identity:
    """No codec: messages are sent as they were released."""

    def apply(self, noised: Noised) -> Noised:
        return noised


@dataclass(frozen=True, kw_only=True)
class Method:
    """A composition of four parts; an ablation swaps one of them."""

    name: str
    training: LocalTraining
    policy: Policy
    mechanism: Mechanism
    aggregation: Aggregation
    codec: Codec = field(default_factory=Identity)
    wrapper: ModelWrapper = field(default_factory=Plain)
    public_start: bool = False  # begins with a logistic head on public records that have the task's labels, if any
    average: float = 0.0  # β of the average over rounds that is reported, where the run names none
    predicts: bool = True  # whether there is a model to judge; a look has answers in its place
    notes: tuple[str, ...] = ()  # what a reader of the results must know, such as a flaw kept in faithful mode
    # The largest ε that a paper's own accountant claims by now, from the policy's state: of faithful modes alone.
    claims: Callable[[State, PublicFacts], float] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mechanism.spec.unit.of_client and not self.training.by_record:
            raise UserError(
                f"{self.name} protects records, but in its local training a record's loss depends on others, so "
                "that clipping each gradient bounds nothing: protect clients, or train by single records"
            )
        check_composition(self)
