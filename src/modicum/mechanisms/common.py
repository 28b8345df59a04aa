"""What the mechanisms share: the query of named blocks, starting points, and paid metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from modicum.core.clips import Clip
from modicum.core.extension_points import Transform
from modicum.core.facts import ClientFacts, Metric
from modicum.core.messages import (
    Decision,
    Message,
    Noised,
    NoisedNumber,
    Opened,
    Released,
    ReleasedSum,
    mean_metrics,
)
from modicum.core.parts import SIGNAL_BOUND, Asked, ClientKit, Job, Signal, SignalName
from modicum.core.release_gate import ReleaseRequest
from modicum.core.round_state import RoundState
from modicum.errors import UnsoundError, UserError
from modicum.privacy.events import Block, NoSampling, Origin, Release, Sampler
from modicum.privacy.integer_noise import IntegerNoise
from modicum.privacy.noise.schedule import TrainingReleases
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import PrivacySpec, Unit


def query(
    name: str, bound: float, multiplier: float, signals: Sequence[Signal], shared: float | None = None
) -> tuple[Block, ...]:
    """The blocks of one query whose joint noise multiplier is at least `multiplier`.

    A signal gets ratio·z, or ratio·`shared` where clients of unequal budgets add up their signals; the main block
    gets what then remains of z⁻² = Σ z_b⁻². A multiplier of 0 means that everything is sent in the clear.
    """
    if not signals:
        return (Block(name, bound, multiplier),)
    rest = 1 - math.fsum(s.ratio**-2 for s in signals)
    main = multiplier / math.sqrt(rest) * (1 + 1e-14)  # rounded up: never below the planned noise
    return (
        Block(name, bound, main),
        *(Block(s.name, SIGNAL_BOUND, s.ratio * max(multiplier, shared or 0.0) * (1 + 1e-14)) for s in signals),
    )


def once(
    asked: Asked,
    spec: PrivacySpec,
    blocks: tuple[Block, ...],
    integers: IntegerNoise | None = None,
    bound_origin: Origin = Origin.PRESET,
) -> Release:
    """One release of everything in a round: nothing is drawn."""
    return Release(
        client=asked.facts.name,
        round=asked.broadcast.round,
        spec=spec,
        blocks=blocks,
        sampler=NoSampling(),
        bound_origin=bound_origin,
        integers=integers,
    )


def moved(decision: Decision, rule: Clip) -> float:
    """How far one unit moves a clipped sum: as far as the rule that clips says, at most what was decided."""
    reach = decision.rule(rule).bound
    if not reach <= decision.bound * (1 + 1e-9):  # bounds of layers are added up in another order
        raise UnsoundError(
            f"{type(rule).__name__} clips to {reach:g} where {decision.bound:g} was decided: noise is made for "
            "that, so let scaled_to keep to it"
        )
    return decision.bound


def once_a_round(
    facts: ClientFacts, spec: PrivacySpec, purpose: str, sampler: Sampler | None = None
) -> TrainingReleases:
    """One release in each round that a client takes part in."""
    return TrainingReleases(
        client=facts.name,
        budget=facts.budget,
        spec=spec,
        purpose=purpose,
        sampler=sampler or NoSampling(),
        steps=facts.participations,
        participations=facts.participations,
    )


def on_cpu(parts: Sequence[Tensor]) -> list[Tensor]:
    """Small tensors of one device, fetched with a single question to it."""
    if not parts or not parts[0].is_cuda:
        return list(parts)
    return list(torch.split(torch.cat(list(parts)).cpu(), [len(part) for part in parts]))


def contributions(norms: Tensor, bound: float, signals: Sequence[Signal]) -> dict[str, Tensor]:
    """Sum over the batch of each signal's bounded contribution (private until it has passed the gate)."""
    norms = norms.double()
    values = {
        SignalName.CLIP_BIT: lambda: (norms <= bound).double() - 0.5,
        SignalName.SQUARE_NORM: lambda: (norms.clamp(max=bound) / bound) ** 2 - 0.5,
    }
    return {s.name: values[s.name]().sum().reshape(1) for s in signals}


def start(job: Job, kit: ClientKit) -> Tensor:
    """The client's local model before training: shared parameters from the server, personal ones of its own."""
    model = job.broadcast.model
    if _all_shared(job, kit):
        return model
    theta = model.new_empty(len(kit.shared))
    theta[kit.shared] = model
    theta[~kit.shared] = job.state["personal"].to(model)
    return theta


def starts(jobs: Sequence[Job], kit: ClientKit) -> Tensor:
    """The local models before training, one row a client; where they are all the server's, that one many times."""
    model = jobs[0].broadcast.model
    if all(job.broadcast.model is model and _all_shared(job, kit) for job in jobs):
        return model.expand(len(jobs), -1)
    return torch.stack([start(job, kit) for job in jobs])


def shared_part(values: Tensor, job: Job, kit: ClientKit) -> Tensor:
    """What a message carries of a parameter vector, or of many as rows."""
    return values if _all_shared(job, kit) else values[..., kit.shared]


def transformed(updates: Tensor, transform: Transform | None) -> Tensor:
    """Each client's update, a row, through a transform that sees it alone; private like what went in."""
    if transform is None:
        return updates
    rows = [transform.apply(update.clone()) for update in updates.unbind()]
    for row in rows:
        if (row.shape, row.dtype) != (updates.shape[1:], updates.dtype):
            raise UserError(f"{type(transform).__name__} changes the shape or precision of updates: keep both")
    return torch.stack(rows)


def _all_shared(job: Job, kit: ClientKit) -> bool:
    """Told from the length of the server's model: looking at the mask itself would cost more than a step."""
    return len(job.broadcast.model) == len(kit.shared)


def keep_personal(job: Job, kit: ClientKit, trained: Tensor) -> dict[str, object]:
    """The client's state after the round, with its personal parameters in it."""
    # A policy's state holds releases only, so training neither sees nor writes it.
    own = {key: value for key, value in job.state.items() if key != "policy"}
    state = kit.training.finish(job.records, own, trained, kit.backend)
    state.pop("policy", None)
    if not _all_shared(job, kit):
        state["personal"] = trained[~kit.shared].clone()
    return state


def metric_plans(
    spec: PrivacySpec, metrics: Sequence[Metric], rounds: Sequence[int]
) -> tuple[PlannedRelease, ...]:
    """What the declared metrics will cost a client that takes part in these rounds."""
    due = [(m, sum(r % m.every == 0 for r in rounds)) for m in metrics]
    return tuple(PlannedRelease(m.block, spec.own(m.noise_multiplier), NoSampling(), n) for m, n in due if n)


def metric_events(spec: PrivacySpec, asked: Asked, metrics: Sequence[Metric]) -> tuple[Release, ...]:
    """A sum of shares, such as a count of correct answers: one record moves it by at most 1.

    A client moves its centred rate by ½. The plan says whether their noise is drawn on a lattice.
    """
    bound = 1.0 if spec.unit.of_client else SIGNAL_BOUND
    planned = {r.purpose: r for r in asked.plan.releases if r.integers is not None}

    def noise(metric: Metric) -> float:
        on_lattice = planned.get(metric.block)
        return spec.own(metric.noise_multiplier) if on_lattice is None else on_lattice.noise_multiplier

    return tuple(
        once(
            asked,
            spec,
            (Block(m.block, bound, noise(m)),),
            planned[m.block].integers if m.block in planned else None,
        )
        for m in metrics
        if m.name in asked.broadcast.metrics
    )


def metric_requests(job: Job, kit: ClientKit, spec: PrivacySpec) -> list[ReleaseRequest]:
    """The metrics that are due, not to be seen before they have passed the gate."""
    return [
        ReleaseRequest(
            job.gate, event, 0, {event.blocks[0].name: metric_value(job, kit, spec.unit, event.blocks[0].name)}
        )
        for event in metric_events(spec, job, kit.metrics)
    ]


def expected_metrics(events: Sequence[Release], unit: Unit, records: int) -> dict[str, NoisedNumber]:
    """What released metrics can be: a rate of 0 to 1 and its noise, on the scale of `metric_rate`."""
    over = max(1, records) if unit.of_client else 1
    found = {}
    for block in (event.blocks[0] for event in events):
        found[block.name.removeprefix("metric:")] = NoisedNumber(0.5, 0.5, block.noise_std / over)
    return found


class Individually:
    """Collects messages that may be seen one by one, each with what the server knows of its noise."""

    def __init__(self, state: RoundState) -> None:
        self._state, self._released = state, list[Released]()

    def add(self, message: Message) -> None:
        if isinstance(message, Noised):
            self._released.append(message.known(self._state.expected[message.client].facts))

    def open(self) -> tuple[Released, ...] | None:
        """None where nobody sent anything."""
        return tuple(self._released) if self._released or self._state.impossible else None


def metric_value(job: Job, kit: ClientKit, unit: Unit, block: str) -> Tensor:
    """A metric of the broadcast model, summed over the client's validation records, each at most 1 (private)."""
    outputs = kit.backend.outputs(start(job, kit), job.validation.x)
    shares = kit.task.share(block.removeprefix("metric:"), outputs, job.validation.targets["y"])
    if job.validation.present is not None:
        shares = torch.where(job.validation.present, shares, shares.new_zeros(()))
    total = shares.sum().reshape(1)
    return total if unit.of_client else total / max(1, len(job.validation)) - SIGNAL_BOUND


def metric_rate(noised: float, unit: Unit, records: int) -> float:
    """A released count as a share of the records, back on the scale from 0 to 1."""
    return noised / max(1, records) if unit.of_client else noised + SIGNAL_BOUND


def told_metrics(
    opened: Opened | None, declared: Sequence[Metric], unit: Unit, clients: Iterable[ClientFacts]
) -> tuple[dict[str, float], dict[str, float]]:
    """Released metrics for people, and the standard deviation of the noise in each that was declared.

    A rate below 0 or above 1 is told as 0 or 1: that is post-processing, and policies see what was released.
    """
    values, sizes, stds = mean_metrics(opened), {f.name: max(1, f.validation) for f in clients}, dict[str, float]()
    for metric in (m for m in declared if m.name in values):
        if not math.isnan(values[metric.name]):
            values[metric.name] = min(1.0, max(0.0, values[metric.name]))
        bound = 1.0 if unit.of_client else SIGNAL_BOUND
        if isinstance(opened, ReleasedSum):
            stds[metric.name] = metric.noise_multiplier * bound / opened.denominator
        elif opened is not None:
            own = [r.client for r in opened if metric.name in r.metrics]
            shares = [bound / (sizes[name] if unit.of_client else 1) for name in own]
            stds[metric.name] = metric.noise_multiplier * math.hypot(*shares) / len(own)
    return values, stds


def released_metrics(job: Job, kit: ClientKit, spec: PrivacySpec) -> dict[str, float]:
    """Noisy metrics of the broadcast model, for mechanisms whose every message is released on its own."""
    rates = {}
    for event in metric_events(spec, job, kit.metrics):
        block = event.blocks[0].name
        noised = job.gate.release(event, 0, {block: metric_value(job, kit, spec.unit, block)})[block].item()
        rates[block.removeprefix("metric:")] = metric_rate(noised, spec.unit, job.facts.validation)
    return rates
