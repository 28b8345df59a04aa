"""Record-level noise that falls in stages fixed before the run: DP-ACDN's adaptive noise without a peek."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Decision
from modicum.errors import UserError
from modicum.mechanisms.as_published import SLACK
from modicum.mechanisms.record_local import GRADIENT, RecordLocal
from modicum.privacy.accounting.calibration import calibrate_kinds
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.events import Origin, Sampler
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan

LEAST = 1e-3  # of ρ: noise that falls faster is none


@dataclass(frozen=True, kw_only=True)
class FallingNoise(RecordLocal):
    """z_s = z₀·ρ^s in stage s of the run, z₀ the least that keeps all stages together within the budget.

    Stages and ρ are preset, so that plain composition prices them (R1). `printed` gives z₀ as a paper has it: the
    plan then holds the true ε of it all.
    """

    total: int  # rounds of the run
    stages: int = 4
    ratio: float = 0.8  # ρ
    printed: Callable[[ClientFacts], float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.stages <= self.total or not LEAST <= self.ratio <= 1:
            raise UserError(
                f"noise falls in 1 to {self.total} stages, each with a ratio in [{LEAST:g}, 1] to the one before, "
                f"got {self.stages} and {self.ratio}"
            )
        if self.adaptive or self.stock or self.noise_multiplier is not None:
            raise UserError("falling noise has stages of its own: set neither adaptive noise nor a multiplier")

    @property
    def takes_integers(self) -> bool:
        return False  # a lattice has one noise for all releases of a query

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        if math.isinf(facts.budget):
            return PrivacyPlan(client=facts.name, spec=self.spec, budget=math.inf, guard=Guard.NONE)
        sampler, counts = self.sampler(facts), self._counts(facts)
        ratios = tuple(self.ratio**s for s in range(self.stages))
        if self.printed is None:
            kinds = tuple(zip(ratios, counts, strict=True))
            first = calibrate_kinds(self.spec, facts.budget, sampler, kinds, metrics)
            return self._plan(facts, _releases(first, sampler, counts, ratios, metrics), facts.budget)
        releases = _releases(self.printed(facts), sampler, counts, ratios, metrics)
        return self._plan(facts, releases, epsilon(list(releases), self.spec).epsilon * (1 + SLACK))

    def _plan(self, facts: ClientFacts, releases: tuple[PlannedRelease, ...], budget: float) -> PrivacyPlan:
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=budget, releases=releases)

    def _counts(self, facts: ClientFacts) -> tuple[int, ...]:
        """Steps of each stage; of a cohort's members some may release fewer."""
        longest = -(-self.total_steps(facts) // facts.participations)
        if facts.participations == self.total:
            ends = [self._begins(s) for s in range(self.stages + 1)]
            return tuple(sum(self.steps_in(facts, t) for t in range(a, b)) for a, b in pairwise(ends))
        return tuple(
            longest * min(facts.participations, self._begins(s + 1) - self._begins(s)) for s in range(self.stages)
        )

    def _begins(self, stage: int) -> int:
        return -(-stage * self.total // self.stages)

    def _stage(self, round: int) -> int:
        return min(round * self.stages // self.total, self.stages - 1)

    def _noise(
        self, facts: ClientFacts, plan: PrivacyPlan, broadcast: Broadcast, decision: Decision, participation: int
    ) -> tuple[float, Origin]:
        now = [r for r in plan.releases if r.purpose == GRADIENT]
        if now:  # none where no privacy is claimed
            return now[self._stage(broadcast.round)].noise_multiplier, Origin.PRESET
        return super()._noise(facts, plan, broadcast, decision, participation)


def _releases(
    first: float,
    sampler: Sampler,
    counts: tuple[int, ...],
    ratios: tuple[float, ...],
    metrics: tuple[PlannedRelease, ...],
) -> tuple[PlannedRelease, ...]:
    steps = (PlannedRelease(GRADIENT, first * r, sampler, n) for r, n in zip(ratios, counts, strict=True))
    return (*steps, *metrics)
