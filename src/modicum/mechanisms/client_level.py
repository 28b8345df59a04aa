"""Client-level privacy: the whole update of a client is clipped and hidden. The view says who adds the noise.

Server sees every message: each client adds all of it. Secure aggregation: each adds a share, σC/√(P−c) where c may
collude or drop out, and only the sum over the cohort is seen (R8). Trusted server: the server adds it to the sum,
and its cohort may be a secret Poisson draw (R5).

Where clients of unequal budgets share one noise, a client with a stricter budget gets a smaller bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from modicum.core.extension_points import Transform
from modicum.core.facts import ClientFacts
from modicum.core.messages import (
    ClippedUpdate,
    Decision,
    Expected,
    Message,
    Noised,
    NoisedNumber,
    NoiseFacts,
    ReleasedSum,
    Sealed,
    Share,
)
from modicum.core.needs import Need
from modicum.core.parts import SIGNAL_BOUND, Asked, ClientKit, Job, Signal, State
from modicum.core.release_gate import ReleaseRequest, release_together
from modicum.core.round_state import Collector, RoundState
from modicum.errors import UnsoundError, UserError
from modicum.mechanisms import common, integers
from modicum.privacy.correlated import Correlated
from modicum.privacy.events import NoSampling, Origin, Poisson, Release, Sampler
from modicum.privacy.noise.choose import schedule_for
from modicum.privacy.noise.correlated import CorrelatedNoise
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.noise.schedule import Moment, Schedule, TrainingReleases
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import Adjacency, KnownTo, ServerSeesMessages, Shows, Unit, Variant, View
from modicum.training.local_steps import LocalSteps, train_locally

UPDATE = "update"
DOUBLES = 1 << 18  # numbers in double precision at a time: they stay in the cache


@dataclass(frozen=True, kw_only=True)
class ClientLevel:
    """Clips each client's update and hides it from the adversary of `view`."""

    view: View = field(default_factory=ServerSeesMessages)
    local: LocalSteps = field(default_factory=LocalSteps)
    adjacency: Adjacency = Adjacency.ZERO_OUT
    delta: float = 1e-5
    noise_multiplier: float | None = None  # in what the adversary sees; None: calibrated to each client's budget
    rate: float | None = None  # of the trusted server's secret Poisson cohort
    transform: Transform | None = None  # of each client's update, before it is clipped, in every view
    integers: bool = False  # noise is drawn on a lattice: what masks need, and exact (R12)
    correlated: Correlated | None = None  # over rounds (R19); None: fresh noise in each of them

    purpose = UPDATE
    offers = (Need.SIGNALS,)

    def __post_init__(self) -> None:
        _ = self.schedule  # refuses what cannot be
        if self.rate is not None and KnownTo.SERVER not in self.view.hides:
            raise UnsoundError(
                "a random cohort amplifies only where a trusted server keeps it secret (R5): use the view "
                "trusted-server, or a public balanced schedule"
            )
        if self.correlated is not None:
            self._refuse_correlated()

    def _refuse_correlated(self) -> None:
        """One party must add the noise of successive releases, and separation must be public (R19)."""
        if self.view.senders_add_noise:
            raise UnsoundError(
                "correlated noise takes back in later rounds what one party added in earlier ones, and here each "
                "client adds its own (R19): use the view trusted-server, or independent noise"
            )
        if self.rate is not None:
            raise UnsoundError(
                "correlated noise rests on rounds that keep a distance, and secret coins keep none (R19): leave "
                "rate out"
            )

    @cached_property
    def schedule(self) -> Schedule:
        """How much noise each release carries."""
        fixed = schedule_for(self.noise_multiplier, integers=self.integers)
        return fixed if self.correlated is None else CorrelatedNoise(self.correlated, self.noise_multiplier)

    @cached_property
    def spec(self) -> PrivacySpec:
        return PrivacySpec(unit=Unit.CLIENT, adjacency=self.adjacency, view=self.view, delta=self.delta)

    @property
    def individuals(self) -> bool:
        return self.view.shows is Shows.MESSAGES

    @property
    def cohort_rate(self) -> float | None:
        return self.rate

    @property
    def sampler(self) -> Sampler:
        """Poisson cohorts that a trusted server keeps secret, or none."""
        return NoSampling() if self.rate is None else Poisson(self.rate, KnownTo.SERVER)

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        return self.schedule.agree(self._releases_of(facts), metrics)

    def _releases_of(self, facts: ClientFacts) -> TrainingReleases:
        return common.once_a_round(facts, self.spec, UPDATE, self.sampler)

    def decisions(self, chosen: Mapping[str, Decision], multipliers: Mapping[str, float]) -> dict[str, Decision]:
        """In a sum, bounds go in inverse proportion to the multipliers: z_i·C_i is one noise for all.

        Signals have a bound that cannot shrink, so all of them get the noise that the strictest budget asks for.
        """
        if self.individuals:
            return dict(chosen)
        least = min((z for z in multipliers.values() if z > 0), default=1.0)
        most = max(multipliers.values(), default=0.0) or None
        return {
            client: Decision(d.bound * least / (multipliers.get(client) or least), d.noise_multiplier, most)
            for client, d in chosen.items()
        }

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        return (self.event(asked, kit.policy.signals), *common.metric_events(self.spec, asked, kit.metrics))

    def event(self, asked: Asked, signals: Sequence[Signal] = ()) -> Release:
        """What a client reserves for one update."""
        decision, plan, round = asked.broadcast.decision, asked.plan, asked.broadcast.round
        now = Moment(round, asked.participation, decision.noise_multiplier, decision.kind)
        z, origin = self.schedule.noise(self._releases_of(asked.facts), plan, now)
        on_lattice, terms = plan.integers(UPDATE), plan.correlation(UPDATE)
        # On a lattice the noise is fixed in the agreed terms: whatever a server says of it changes nothing (R13).
        shared = decision.signal_multiplier if on_lattice is None else None
        return Release(
            client=asked.facts.name,
            round=round,
            spec=self.spec,
            blocks=common.query(UPDATE, decision.bound, z, signals, shared),
            sampler=self.sampler,
            bound_origin=Origin.RELEASED,
            noise_origin=origin,
            integers=on_lattice,
            correlated=None if terms is None else terms.rows,
        )

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        """An update within its bound plus one draw of noise; behind a trusted server without any."""
        event, *metrics = self.events(asked, kit)
        if event.integers is not None and not self.individuals:
            return integers.nothing_seen(event)
        main, *signals = event.blocks
        noisy = float(self.view.senders_add_noise)
        update = ClippedUpdate(main.bound, noisy * main.noise_std)
        stds = {b.name: b.noise_std for b in signals}
        known = NoiseFacts(main.noise_std**2, 1.0, {name: std**2 for name, std in stds.items()})
        middle = SIGNAL_BOUND if self.individuals else 0.0  # a share's and a sealed message's values are centred
        rates = common.expected_metrics(metrics, Unit.CLIENT, asked.facts.validation)
        if not self.individuals:
            stds, rates = stds | {e.blocks[0].name: e.blocks[0].noise_std for e in metrics}, {}
        numbers = {name: NoisedNumber(middle, SIGNAL_BOUND, noisy * std) for name, std in stds.items()}
        return Expected(known, update, numbers, rates)

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        first = common.starts(jobs, kit)
        trained = train_locally(jobs, first, kit, self.local)
        states = [common.keep_personal(job, kit, last) for job, last in zip(jobs, trained, strict=True)]
        updates = common.transformed(common.shared_part(trained.sub_(first), jobs[0], kit), self.transform)
        requests = self._requests(jobs, kit, updates)
        metrics = [common.metric_requests(job, kit, self.spec) for job in jobs]
        if not self.view.senders_add_noise:
            sealed = [_sealed([request, *more]) for request, more in zip(requests, metrics, strict=True)]
            return list(zip(sealed, states, strict=True))
        if self.integers and not self.individuals:
            summands = [
                integers.summand([request, *more]) for request, more in zip(requests, metrics, strict=True)
            ]
            return list(zip(summands, states, strict=True))
        noised, others = release_together(requests, UPDATE, updates)
        for values, more in zip(others, metrics, strict=True):
            for request in more:
                values |= request.gate.release(request.release, request.step, request.sums)
        messages = [
            self._message(request.release, update, _scalars(values))
            for request, update, values in zip(requests, noised.unbind(), others, strict=True)
        ]
        return list(zip(messages, states, strict=True))

    def _requests(self, jobs: Sequence[Job], kit: ClientKit, updates: Tensor) -> list[ReleaseRequest]:
        """Each client's clipped update and signals; not to be seen before they have passed the gate."""
        bounds = [job.broadcast.decision.bound for job in jobs]
        norms = clip_updates(updates, bounds).cpu().unbind()
        return [
            ReleaseRequest(
                job.gate,
                self.event(job, kit.policy.signals),
                0,
                {UPDATE: update, **common.contributions(norm.reshape(1), bound, kit.policy.signals)},
            )
            for job, update, norm, bound in zip(jobs, updates.unbind(), norms, bounds, strict=True)
        ]

    def _message(self, event: Release, update: Tensor, scalars: Mapping[str, float]) -> Message:
        if not self.individuals:
            return Share(event.client, event.round, update, scalars)
        signals, metrics = _tell_apart(scalars)
        return Noised(event.client, event.round, update, signals, metrics)

    def open_integers(self, total: Integers, survivors: Sequence[str], state: RoundState) -> ReleasedSum | None:
        """The server half where secure aggregation gave the sum of the survivors' summands."""
        return integers.open_sum(total, survivors, state)

    @property
    def takes_integers(self) -> bool:
        return self.view.senders_add_noise and self.rate is None

    def on_integers(self, variant: Variant) -> ClientLevel:
        return replace(self, integers=True, view=integers.behind(self.view, variant))

    def correlate(self, noise: Correlated) -> ClientLevel:
        """The same with noise that is correlated over rounds."""
        return replace(self, correlated=noise)

    def collect(self, state: RoundState) -> Collector:
        return common.Individually(state) if self.individuals else CohortSum(self.view, state, self.correlated)


class CohortSum:
    """Adds up shares, or a trusted server's sealed messages, one after another; absentees count as zero (R7)."""

    def __init__(self, view: View, state: RoundState, correlated: Correlated | None = None) -> None:
        self._view, self._state, self._correlated = view, state, correlated
        self._kind = Share if view.senders_add_noise else Sealed
        self._stds = _shared_noise(state.events)
        self._total, self._count = torch.zeros_like(state.model), 0
        self._scalars = {name: list[float]() for name in self._stds if name != UPDATE}

    def add(self, message: Message) -> None:
        if not isinstance(message, self._kind) or not self._scalars.keys() <= message.signals.keys():
            return
        self._total += message.update
        self._count += 1
        for name, values in self._scalars.items():
            values.append(message.signals[name])

    def open(self) -> ReleasedSum | None:
        view, state, stds = self._view, self._state, self._stds
        if not view.enough(self._count, len(state.cohort)):
            return None
        exact = {n: torch.tensor([math.fsum(v)], dtype=torch.float64) for n, v in self._scalars.items()}
        sums = {UPDATE: self._total, **exact}
        if view.senders_add_noise:
            stds = {name: std * math.sqrt(self._count) for name, std in stds.items()}
        else:
            if state.gate is None:
                raise UserError("a trusted server needs its own gate to add the noise")
            sums = state.gate.release_sum(state.events, state.round, sums)
        if self._correlated is not None:
            spread = self._correlated.spread(state.round)
            stds = {n: std if n.startswith("metric:") else std * spread for n, std in stds.items()}
        return _released_sum(state, sums, stds)


def clip_updates(updates: Tensor, bounds: Sequence[float]) -> Tensor:
    """Clip each row to its bound, where it stands; gives the norms before. A model that diverged becomes zero."""
    norms = torch.cat([_norms(some) for some in torch.split(updates, max(1, DOUBLES // updates.shape[1]))])
    finite = torch.isfinite(norms)
    if not bool(finite.all()):
        updates[~finite] = 0.0
        norms = torch.where(finite, norms, 0.0)
    # Rounding must not exceed the bound.
    scales = norms.new_tensor(bounds) / norms.clamp(min=1e-300) * (1 - 1e-6)
    tiny = scales <= 1e-30
    if bool(tiny.any()):  # a factor below single precision's normal range would itself be rounded too coarsely
        updates[tiny] = (updates[tiny].double() * scales[tiny, None]).to(updates.dtype)
        scales[tiny] = 1.0
    updates.mul_(scales.clamp(max=1.0).to(updates.dtype)[:, None])
    return norms


def _norms(updates: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    return norms


def _sealed(requests: Sequence[ReleaseRequest]) -> Sealed:
    sums = {block: value for request in requests for block, value in request.sums.items()}
    event = requests[0].release
    return Sealed(event.client, event.round, sums[UPDATE], _scalars(sums))


def _scalars(values: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in values.items() if name != UPDATE}


def _tell_apart(centred: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Centred values → (clipping signals, metrics), back on their own scale."""
    values = {name: value + SIGNAL_BOUND for name, value in centred.items()}
    metrics = {n.removeprefix("metric:"): v for n, v in values.items() if n.startswith("metric:")}
    return {n: v for n, v in values.items() if not n.startswith("metric:")}, metrics


def _shared_noise(events: Mapping[str, tuple[Release, ...]]) -> dict[str, float]:
    """Each block's noise, which all clients must share: unequal values would break somebody's guarantee (R7)."""
    stds: dict[str, float] = {}
    for event in (e for es in events.values() for e in es):
        for block in event.blocks:
            std = stds.setdefault(block.name, block.noise_std)
            if not math.isclose(std, block.noise_std, rel_tol=1e-9):
                raise UnsoundError(
                    f"clients of one sum ask for different noise on {block.name!r} (R7): give all "
                    "of them the same noise multiplier times bound"
                )
            stds[block.name] = max(std, block.noise_std)
    return stds


def _released_sum(state: RoundState, sums: Mapping[str, Tensor], stds: Mapping[str, float]) -> ReleasedSum:
    """The mean over the fixed public denominator, and what is known of its noise."""
    over = state.denominator
    signals, metrics = _tell_apart({n: v / over for n, v in _scalars(sums).items()})
    facts = NoiseFacts((stds[UPDATE] / over) ** 2, 1.0, {n: (stds[n] / over) ** 2 for n in signals})
    return ReleasedSum(state.round, sums[UPDATE] / over, signals, facts, over, metrics)
