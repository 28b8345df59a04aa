"""What an attacker has: the bytes of a transcript that its view lets it see, and public facts. Nothing else.

`AdversaryView` is the only thing that an attack is given. It is made from a transcript and from an experiment
whose clients' records have been replaced by blank ones, so that whatever an attack finds, it found in messages.
What is true lies in `attacks/truth.py`, which scorers read and attacks never get.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from modicum.core.extension_points import TellsNoise, secret_rate
from modicum.core.facts import ClientFacts
from modicum.core.layout import Layout
from modicum.core.messages import (
    Broadcast,
    Expected,
    Message,
    Noised,
    NoiseFacts,
    Released,
    ReleasedSum,
    Sealed,
    Share,
    decode,
)
from modicum.core.parts import Asked, Batch, Method
from modicum.core.release_gate import SERVER
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation, offer_of
from modicum.federation.setup import RunContext, set_up
from modicum.federation.transcript import AGGREGATOR, Seen
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.views import Shows, View


@dataclass(frozen=True, eq=False)
class Public:
    """What everybody may know of a run: its settings, names and sizes, and synthetic records.

    `setup` holds blank records; its plans, frame and cohorts follow from public facts alone.
    """

    setup: RunContext = field(repr=False)
    pool: Batch = field(repr=False)  # like the clients', and not among them: what the attacker brings
    pool_note: str

    @property
    def method(self) -> Method:
        """The run's method."""
        return self.setup.method

    @property
    def model(self) -> nn.Module:
        """The architecture. Which parameters a message was made with stands in the message's broadcast."""
        return self.setup.data.model

    @property
    def layout(self) -> Layout:
        """How parameters lie in the flat vector."""
        return self.setup.kit.backend.layout

    @property
    def view(self) -> View:
        """Who looks on."""
        return self.method.mechanism.spec.view

    @property
    def device(self) -> torch.device:
        """Where attacks compute: wherever the model was put."""
        return next(self.model.parameters()).device

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.setup.experiment.federation.data.classes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one record as the model is given it."""
        return tuple(self.pool.x.shape[1:])

    @property
    def clients(self) -> dict[str, ClientFacts]:
        """What everyone may know of each client, by name."""
        return {facts.name: facts for facts in self.setup.facts}


@dataclass(frozen=True, eq=False)
class Observed:
    """One message, or one sum, as somebody saw it."""

    round: int
    senders: tuple[str, ...]  # one, or everybody that a sum may hold
    model: Tensor = field(repr=False)  # all parameters before the round; personal ones are unknown and zero
    update: Tensor = field(repr=False)  # of all parameters, likewise
    bound: float  # C that the sender was told
    facts: NoiseFacts  # noise in each coordinate, from plan and decision
    share: float = 1.0  # what one sender's update is multiplied by in `update`: 1/cohort in a mean
    signals: Mapping[str, float] = field(default_factory=dict)

    @property
    def sender(self) -> str:
        """The client, or how many clients a sum is of."""
        return self.senders[0] if len(self.senders) == 1 else f"{len(self.senders)} clients"


@dataclass(frozen=True, eq=False)
class AdversaryView:
    """Everything that an attack is given."""

    public: Public
    party: str  # whose eyes: "(server)", or "(secure aggregation)" which the claim trusts
    observed: tuple[Observed, ...]

    @property
    def claimed(self) -> bool:
        """Whether the run's ε is meant to hold against this party."""
        return self.party == SERVER

    def of(self, sender: str) -> tuple[Observed, ...]:
        """What was seen of one client alone."""
        return tuple(o for o in self.observed if o.senders == (sender,))

    def sentence(self) -> str:
        """Who saw what, and how much of it."""
        what = "each client's message" if any(len(o.senders) == 1 for o in self.observed) else "sums of a cohort"
        return f"{self.party} saw {what}: {len(self.observed)} in {len({o.round for o in self.observed})} rounds"


def split_pool(data: FederatedData, seed: int = 0) -> tuple[Arrays, Arrays, str]:
    """(the attacker's records, fresh ones that nobody has, where the first come from).

    Labelled proxy records are the attacker's; without any, a public coin gives it half of the test records.
    """
    if offer_of(data).public_labels:
        proxy = Arrays.concatenate([data.proxy, data.proxy_validation])
        return proxy, data.test, f"{len(proxy)} public proxy records"
    coin = np.random.default_rng([seed, 18]).random(len(data.test)) < 0.5
    pool, fresh = data.test.take(np.flatnonzero(coin)), data.test.take(np.flatnonzero(~coin))
    return pool, fresh, f"{len(pool)} records like the clients' (half of the test records, by a public coin)"


def public_of(experiment: Experiment, pool: Arrays, pool_note: str) -> Public:
    """The experiment's public side. Not one private record is left in it."""
    setup = set_up(without_records(experiment, pool), SimulatedNoise(0))
    return Public(setup, setup.data.test, pool_note)


def without_records(experiment: Experiment, test: Arrays) -> Experiment:
    """The same experiment over blank records of the same number, with these for its test records."""
    data = experiment.federation.data
    clients = tuple(
        ClientData(c.name, *(_blank(part, data.classes, i) for part in (c.train, c.validation, c.test)))
        for i, c in enumerate(data.clients)
    )
    federation = Federation(replace(data, clients=clients, test=test), experiment.federation.budgets)
    return replace(experiment, federation=federation, hot_start=0)


def _blank(like: Arrays, classes: int, first: int) -> Arrays:
    y = (first + np.arange(len(like))) % classes if like.has_classes else np.zeros_like(like.y)
    return Arrays(np.zeros_like(like.x), y)


def view_of(seen: Iterable[Seen], public: Public, party: str = SERVER) -> AdversaryView:
    """What `party` saw of a run, decoded from its bytes.

    The server of a run with messages sees each of them; behind secure aggregation, or a trusted server, what
    everybody sees is the noised sum, of which the models are functions. "(secure aggregation)" sees every share:
    outside the claim, to show what the claim trusts it with.
    """
    things = list(seen)
    shows = public.view.shows
    if party not in (SERVER, AGGREGATOR) or (party == AGGREGATOR and shows is not Shows.SUM):
        raise UserError(f"this run has no {party!r} that sees more than the server: use {SERVER!r}")
    sent = {(s.party, s.round): _broadcast(s) for s in things if s.kind == "broadcast"}
    if shows is Shows.MESSAGES or party == AGGREGATOR:
        found = _messages(things, sent, public, party)
    else:
        found = _sums(things, sent, public)
    observed = tuple(found)
    if not observed:
        raise UserError(f"the transcript holds nothing that {party} saw: record a run that got to its first round")
    return AdversaryView(public, party, observed)


def _broadcast(seen: Seen) -> Broadcast:
    found = decode(seen.content)
    if not isinstance(found, Broadcast):
        raise UserError("this transcript is damaged, a proposal in it cannot be read: use an intact copy")
    return found


Sent = Mapping[tuple[str, int], Broadcast]


def _messages(things: Iterable[Seen], sent: Sent, public: Public, party: str) -> Iterator[Observed]:
    for s in things:
        if s.kind != "message" or s.party != party:
            continue
        message, told = decode(s.content), sent.get((s.sender, s.round))
        if not isinstance(message, Noised | Sealed | Share) or told is None or s.sender not in public.clients:
            continue  # a hostile silo's: the server counted it as absent
        expected = _expected(public, told, sum(name == s.sender and r < s.round for name, r in sent))
        facts, told = _as_told(public, message, told, expected.facts)
        yield _observed(public, message, told, (s.sender,), facts)


def _sums(things: Iterable[Seen], sent: Sent, public: Public) -> Iterator[Observed]:
    for s in things:
        if s.kind != "opened":
            continue
        opened = decode(s.content)
        asked = sorted(name for name, round in sent if round == s.round)
        if not isinstance(opened, ReleasedSum) or not asked:
            continue
        cohort = _may_hold(public, asked)
        told = sent[asked[0], s.round]
        of_records = public.method.mechanism.spec.unit.of_client  # a mean over records, not over clients
        share = 1.0 if of_records else 1 / opened.denominator
        yield _observed(public, opened, told, cohort, opened.facts, share)


def _may_hold(public: Public, asked: list[str]) -> tuple[str, ...]:
    """A secret cohort may hold anybody: who was asked is in the transcript, and not in the adversary's view."""
    return tuple(public.clients) if secret_rate(public.method.mechanism) is not None else tuple(asked)


def _expected(public: Public, told: Broadcast, participation: int) -> Expected:
    setup = public.setup
    asked = Asked(public.clients[told.client], setup.plans[told.client], told, participation)
    return setup.method.mechanism.expected(asked, setup.kit)


def _as_told(
    public: Public, message: Noised | Sealed | Share, told: Broadcast, facts: NoiseFacts
) -> tuple[NoiseFacts, Broadcast]:
    """Where messages tell their own noise, the attacker takes it, and the bound that goes with it, from there."""
    mechanism = public.method.mechanism
    if not (isinstance(mechanism, TellsNoise) and isinstance(message, Noised)):
        return facts, told
    optimiser = public.method.training.optimiser
    bound, variance = mechanism.as_told(message, told, public.clients[told.client], optimiser)
    return replace(facts, variance=variance), replace(told, decision=replace(told.decision, bound=bound))


def _observed(
    public: Public,
    message: Message | Released | ReleasedSum,
    told: Broadcast,
    senders: tuple[str, ...],
    facts: NoiseFacts,
    share: float = 1.0,
) -> Observed:
    shared = public.setup.kit.shared
    if message.update.shape != told.model.shape or told.model.shape != (int(shared.sum()),):
        raise UserError(
            "this transcript is of another model than the experiment's: give the run that it belongs to"
        )
    return Observed(
        told.round,
        senders,
        _whole(told.model, shared),
        _whole(message.update, shared),
        told.decision.bound,
        facts,
        share,
        dict(message.signals),
    )


def _whole(values: Tensor, shared: Tensor) -> Tensor:
    full = torch.zeros(len(shared), dtype=values.dtype)
    full[shared.cpu()] = values
    return full
