"""The steps of somebody's own loop: what each costs, whose records are in it, and the noise of what it releases.

Batches, clipping, noise and charges are those of a federation with one client. No model is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from modicum.core.clips import Clip
from modicum.core.facts import ClientFacts
from modicum.core.layer_draws import Bits
from modicum.core.messages import Decision
from modicum.core.own_rows import OwnRows
from modicum.core.parts import Asked
from modicum.core.release_gate import ReservedGate
from modicum.mechanisms.record_local import GRADIENT, RecordLocal
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.events import Release
from modicum.privacy.fixed_shapes import BLANK, Lanes
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import NoiseKey, NoiseSource
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.spec import ModelsSeen, PrivacySpec, Unit

PARTY = "records"
"""The one client's name in ledger and certificate."""


@dataclass(frozen=True, kw_only=True)
class OwnSteps(RecordLocal):
    """DP-SGD in somebody's own loop: what is seen is every model on the way."""

    plain_batches = True

    @property
    def spec(self) -> PrivacySpec:
        return PrivacySpec(unit=Unit.RECORD, adjacency=self.adjacency, view=ModelsSeen(), delta=self.delta)


class Reserves(Protocol):
    """A ledger, as far as a part asks it."""

    def reserve(self, releases: list[Release]) -> list[Token]:
        """Charge them, on disk."""


@dataclass(frozen=True)
class PlannedSteps:
    """All steps of a loop, known before the first record: public values alone.

    Args:
        mechanism: What a step costs.
        facts: The one party's; its participations are the parts of the plan.
        bound: What a record's gradient is clipped to.
        physical: Rows of a batch at most; None: a pass is one batch.
    """

    mechanism: OwnSteps
    facts: ClientFacts
    bound: float
    physical: int | None

    @cached_property
    def plan(self) -> PrivacyPlan:
        """What the party agrees to."""
        return self.mechanism.plan(self.facts, ())

    @property
    def clip(self) -> Clip:
        """How a record is clipped."""
        return self.decision.rule(self.mechanism.rule)

    @property
    def decision(self) -> Decision:
        """The bound of every step."""
        return Decision(self.bound)

    @property
    def parts(self) -> int:
        """After each of which the state is kept."""
        return self.facts.participations

    @property
    def total(self) -> int:
        """Steps of the whole plan."""
        return self.mechanism.total_steps(self.facts)

    def in_part(self, part: int) -> int:
        """Steps of one part."""
        return self.mechanism.steps_in(self.facts, part)

    @property
    def share(self) -> float:
        """Of the records in a step, as an expectation."""
        return self.mechanism.expected_batch(self.facts) / self.facts.records

    @property
    def noise_multiplier(self) -> float:
        """Noise over bound; of a row where noise is correlated."""
        return self.plan.multiplier(GRADIENT)

    @property
    def epsilon(self) -> float:
        """Of the whole plan."""
        return plan_guarantee(self.plan).epsilon

    def own_rows(self, noise: NoiseSource) -> OwnRows:
        """Rows of correlated noise, where the plan has any: the same for as long as the loop lasts."""
        return OwnRows(noise, [self.plan])

    @property
    def in_lanes(self) -> bool:
        """Whether one record more in a step moves others to other passes."""
        return isinstance(self.mechanism.sampler(self.facts).shape, Lanes)

    def rows(self) -> int:
        """Rows of a pass over a step's records, of which some may be blank."""
        sampler, records = self.mechanism.sampler(self.facts), self.facts.records
        return -(-records // sampler.turns) if sampler.shape is None else sampler.shape.rows

    def batches(self, rows: Tensor) -> Iterator[Tensor]:
        """Numbers of a step's records, pass by pass; each pass is cut into physical batches of one size."""
        width = self.rows()
        for numbers in rows if rows.dim() == 2 else rows[None]:
            size = min(self.physical or width, width)
            full = torch.full((-(-width // size) * size,), BLANK)
            full[: len(numbers)] = numbers
            yield from full.view(-1, size)

    def blank(self) -> Tensor:
        """A batch of the loop's shape, of padding alone."""
        return next(self.batches(torch.full((self.rows(),), BLANK)))


class Part:
    """Steps that are reserved together, and the gate that they go through."""

    def __init__(
        self, steps: PlannedSteps, number: int, ledger: Reserves, noise: NoiseSource, rows: OwnRows
    ) -> None:
        self.number, self._steps, self._noise = number, steps, noise
        asked = Asked.alone(steps.facts, steps.plan, number, steps.decision)
        self._release = steps.mechanism.release(asked, (), 0, steps.in_part(number))
        (self.token,) = ledger.reserve([self._release])
        self._gate = ReservedGate(noise, [self.token], rows=rows)

    def steps(self, dimension: int) -> Iterator[Step]:
        """One after another; `dimension` is the gradient's."""
        for number in range(self._steps.in_part(self.number)):
            rows = self._gate.sample(self._release, number, self._steps.facts.records)
            yield Step(self, number, list(self._steps.batches(rows)), dimension)

    def noised(self, step: int, total: Tensor) -> Tensor:
        """The mean gradient with its noise. Released."""
        noised = self._gate.release(self._release, step, {GRADIENT: total})[GRADIENT]
        return noised / self._steps.mechanism.expected_batch(self._steps.facts)

    def bits(self, step: int, batch: int) -> Bits:
        """For layers that draw: in secret, since who gets which draw depends on who else is there."""
        return self._noise.bits(NoiseKey(PARTY, self.number, step, f"layers:{batch}"))


class Step:
    """One step on its way: what its batches have come to so far. Private until `gradient`."""

    def __init__(self, part: Part, number: int, batches: list[Tensor], dimension: int) -> None:
        self.part, self.number, self.batches = part, number, batches
        self.left = len(batches)
        self.present: Tensor | None = None  # rows of the batch at work that are records
        self._total = torch.zeros(dimension, dtype=torch.float64)

    def add(self, total: Tensor) -> None:
        """A batch's clipped sum."""
        self._total = self._total.to(total.device)
        self._total += total
        self.left -= 1

    def gradient(self, device: torch.device) -> Tensor:
        """Released, once."""
        return self.part.noised(self.number, self._total.to(device))
