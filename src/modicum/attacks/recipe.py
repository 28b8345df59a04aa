"""How an update came about, as far as that is public: how many records, steps and which clipping."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from modicum.attacks.adversary_view import Observed, Public
from modicum.core.clips import Auto, Flat, PerLayer
from modicum.core.optimisers import Sgd
from modicum.core.parts import Method
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.mechanisms.record_sums import RecordSums
from modicum.training.local_steps import LocalSteps


class Clip(StrEnum):
    """What is clipped on the way to a message."""

    NOTHING = "nothing"
    RECORDS = "records"  # each record's gradient, in each step
    UPDATE = "update"  # the whole update, once


@dataclass(frozen=True)
class Recipe:
    """One sender's local training."""

    records: int  # that it may have used
    steps: int
    batch: float  # expected, of each step
    lr: float
    momentum: float
    clip: Clip
    rule: Flat | Auto = field(default_factory=Flat)

    @property
    def used(self) -> int:
        """Records that can have entered the update."""
        return min(self.records, max(1, round(self.steps * self.batch)))

    @property
    def gain(self) -> float:
        """|Δ| for a constant gradient of length 1."""
        return Sgd(self.lr, self.momentum).gains(self.steps)[0]


def refuse_unreadable(method: Method) -> None:
    """Methods whose message is no sum of gradients that an attack knows how to read are refused."""
    mechanism = _innermost(method.mechanism)
    optimiser = _optimiser(method)
    if not isinstance(optimiser, Sgd):
        raise UserError(
            f"steps of {type(optimiser).__name__} are not sums of gradients, and no attack here inverts them: "
            'attack a run with optimiser = "sgd"'
        )
    _rule(mechanism)
    local = isinstance(getattr(mechanism, "local", None), LocalSteps)
    if not (local or isinstance(mechanism, RecordLocal | RecordSums)):
        raise UserError(
            f"{method.name} sends no gradients or updates that an attack here knows how to read: attack a run of "
            "another method"
        )


def recipe_of(public: Public, observed: Observed, sender: str | None = None) -> Recipe:
    """The recipe of one sender of what was observed; of a sum of records, of all senders together."""
    refuse_unreadable(public.method)
    facts, mechanism = public.clients[sender or observed.senders[0]], _innermost(public.method.mechanism)
    optimiser = _optimiser(public.method)
    rate, momentum = optimiser.lr, optimiser.momentum
    if isinstance(mechanism, RecordSums):
        records = sum(public.clients[name].records for name in observed.senders)
        return Recipe(records, 1, records, rate, 0.0, Clip.RECORDS, _rule(mechanism))
    if isinstance(mechanism, RecordLocal):
        steps = max(1, mechanism.total_steps(facts) // facts.participations)
        batch = mechanism.expected_batch(facts)
        return Recipe(facts.records, steps, batch, rate, momentum, Clip.RECORDS, _rule(mechanism))
    local = mechanism.local
    clip = Clip.UPDATE if isinstance(mechanism, ClientLevel) else Clip.NOTHING
    steps, batch = local.count(facts.records), min(local.batch, facts.records)
    return Recipe(facts.records, steps, batch, rate, momentum, clip)


def _rule(mechanism: Any) -> Flat | Auto:
    """How a record is clipped."""
    rule = getattr(mechanism, "rule", Flat())
    if isinstance(rule, PerLayer):
        raise UserError("no attack here inverts gradients clipped layer by layer: attack another run")
    found: Flat | Auto = rule
    return found


def _optimiser(method: Method) -> Any:
    """Of local steps, or of the one step that a sum of records makes."""
    mechanism = _innermost(method.mechanism)
    return mechanism.optimiser if isinstance(mechanism, RecordSums) else method.training.optimiser


def _innermost(mechanism: Any) -> Any:
    while hasattr(mechanism, "inner"):
        mechanism = mechanism.inner
    return mechanism
