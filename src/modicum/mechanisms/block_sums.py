"""Sums over records in several blocks, released in one message: what class sums and statistics share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from modicum.core.facts import ClientFacts
from modicum.core.messages import ClippedUpdate, Expected, Message, Noised, NoiseFacts
from modicum.core.parts import ClientKit, Job
from modicum.core.release_gate import ReleaseRequest
from modicum.mechanisms import common, integers
from modicum.privacy.events import Release
from modicum.privacy.views import Shows


def message(job: Job, kit: ClientKit, event: Release, sums: Mapping[str, Tensor]) -> Message:
    """The sums (private) through the gate: noised, or as a summand where only the sum over clients is seen."""
    if event.spec.view.shows is not Shows.MESSAGES:
        requests = [ReleaseRequest(job.gate, event, 0, sums), *common.metric_requests(job, kit, event.spec)]
        return integers.summand(requests)
    noised = job.gate.release(event, 0, sums)
    update = torch.cat([noised[block.name].flatten() for block in event.blocks]).to(job.broadcast.model)
    metrics = common.released_metrics(job, kit, event.spec)
    return Noised(job.facts.name, job.broadcast.round, update, {}, metrics)


def expected(events: Sequence[Release], facts: ClientFacts) -> Expected:
    """n records reach n times the norm of their blocks' bounds; noise adds its own norm."""
    event, *metrics = events
    if event.spec.view.shows is not Shows.MESSAGES:
        return integers.nothing_seen(event)
    first, *others = event.blocks
    reach = facts.records * math.hypot(*(block.bound for block in event.blocks))
    known = NoiseFacts(first.noise_std**2, 1.0, {block.name: block.noise_std**2 for block in others})
    update = ClippedUpdate(reach, max(block.noise_std for block in event.blocks))
    return Expected(known, update, metrics=common.expected_metrics(metrics, event.spec.unit, facts.validation))
