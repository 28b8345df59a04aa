"""Batch gradients clipped as a whole: what FedCompDP prints, with what that truly costs. For faithful mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from modicum.core.facts import ClientFacts
from modicum.core.messages import ClippedUpdate, Decision, NoisedNumber
from modicum.core.needs import Need
from modicum.core.parts import ClientKit
from modicum.core.stack import Pool
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.mechanisms.record_steps import Stepper, release
from modicum.privacy.events import Release, Sampler, Shuffled
from modicum.privacy.spec import Adjacency

SLACK = 1e-6  # of Eq. (4), beside the norm


@dataclass(frozen=True, kw_only=True)
class BatchClipped(RecordLocal):
    """g·min(1, C/(‖g‖ + 1e-6)) of each batch's mean gradient g, plus noise (FedCompDP, Eqs. 4 and 8).

    One record can turn a clipped batch gradient from one direction to any other, so that its influence is bounded
    by 2C, whatever the batch: noise of σC has the multiplier σ/2. Batches of a shuffled pass share no record, so
    that a pass is one event (R4). Entries under `threshold`·(1 − t/T) are left out before (Eq. 2): what is clipped
    afterwards is bounded all the same.
    """

    threshold: float = 0.0  # τ of the first round; the paper gives neither it nor how it decays
    rounds: int = 1  # T, over which it falls to 0

    offers: ClassVar[tuple[Need, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch is None or self.steps is not None or not self.schedule.fits_lattice:
            raise UserError("clipped batches need a batch size and passes (epochs): leave steps out")
        if self.adjacency is not Adjacency.ZERO_OUT:
            raise UserError("a clipped batch moves by 2C under zero-out already: use adjacency zero-out")
        if not 0 <= self.threshold < math.inf:
            raise UserError(f"the threshold τ must be finite and at least 0, got {self.threshold}")

    def sampler(self, facts: ClientFacts) -> Sampler:
        return Shuffled(math.ceil(facts.records / (self.batch or 1)))

    def expected_batch(self, facts: ClientFacts) -> float:
        return 1.0  # what is noised is a mean already

    def _passes(self) -> int:
        return max(1, round(self.epochs))

    def total_steps(self, facts: ClientFacts) -> int:
        """Passes, which are what is charged."""
        return self._passes() * facts.participations

    def steps_in(self, facts: ClientFacts, participation: int) -> int:
        return self._passes() * self._batches(facts)

    def _batches(self, facts: ClientFacts) -> int:
        sampler = self.sampler(facts)
        assert isinstance(sampler, Shuffled)
        return sampler.batches

    def sensitivity(self, decision: Decision) -> float:
        """2C, whatever the batch: one record can turn the clipped gradient anywhere."""
        return 2 * decision.bound

    def charged(self, facts: ClientFacts, steps: int) -> int:
        """Passes: batches of one share no record."""
        return steps // self._batches(facts)

    def _made_of(
        self, event: Release, facts: ClientFacts, kit: ClientKit
    ) -> tuple[ClippedUpdate, dict[str, NoisedNumber]]:
        main, steps = event.blocks[0], self.steps_in(facts, 0)
        return ClippedUpdate(main.bound / 2, main.noise_std, steps, kit.training.optimiser), {}

    def _noised_gradients(
        self, steppers: Sequence[Stepper], pool: Pool, theta: Tensor, kit: ClientKit, step: int
    ) -> Tensor:
        batches = pool.batches([stepper.chosen(step) for stepper in steppers])
        gradients = kit.backend.gradients(theta, batches, kit.training.losses)
        bounds = gradients.new_tensor([stepper.decision.bound for stepper in steppers], dtype=torch.float64)
        tau = self.threshold * max(0.0, 1 - steppers[0].job.broadcast.round / self.rounds)
        gradients = torch.where(gradients.abs() < tau, 0.0, gradients)  # Eq. (2)
        clipped, norms = clip_rows(gradients, bounds)
        return release(steppers, step, clipped, list(norms[:, None]))  # Eq. (8)


def clip_rows(gradients: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Each row clipped to its bound by Eq. (4), and the norms before (R10).

    A gradient that overflowed becomes zero: no factor bounds it. Products are made in double precision, where the
    factor of the longest row is not rounded to nothing.
    """
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
    finite = torch.isfinite(norms)
    factors = (bounds / (norms + SLACK)).clamp(max=1.0)
    clipped = torch.where(finite[:, None], gradients.double() * factors[:, None], 0.0)
    return clipped.to(gradients.dtype), torch.where(finite, norms, 0.0)
