"""Noise that falls in stages fixed before the run: DP-ACDN's adaptive noise without a peek."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from modicum.errors import UserError
from modicum.mechanisms.as_published import SLACK
from modicum.privacy.accounting.calibration import calibrate_kinds
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.events import Origin
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases, chosen
from modicum.privacy.plan import PlannedRelease, PrivacyPlan

LEAST = 1e-3  # of ρ: noise that falls faster is none


@dataclass(frozen=True, kw_only=True)
class FallingNoise(Schedule):
    """z_s = z₀·ρ^s in stage s of the run, z₀ the least that keeps all stages together within the budget.

    Stages and ρ are preset, so that plain composition prices them (R1). `printed` gives z₀ for a budget as a paper
    has it: the plan then holds the true ε of it all.
    """

    total: int  # rounds of the run
    stages: int = 4
    ratio: float = 0.8  # ρ
    printed: Callable[[float], float] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= self.total or not LEAST <= self.ratio <= 1:
            raise UserError(
                f"noise falls in 1 to {self.total} stages, each with a ratio in [{LEAST:g}, 1] to the one before, "
                f"got {self.stages} and {self.ratio}"
            )

    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        counts = self._counts(of)
        kinds = tuple((self.ratio**s, count) for s, count in enumerate(counts))
        if self.printed is None:
            first = calibrate_kinds(of.spec, of.budget, of.sampler, kinds, also)
        else:
            first = self.printed(of.budget)
        releases = (*(of.planned(first * ratio, count) for ratio, count in kinds), *also)
        if self.printed is None:
            return of.plan(releases)
        return of.plan(releases, epsilon(list(releases), of.spec).epsilon * (1 + SLACK))

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        stages = [r.noise_multiplier for r in plan.releases if r.purpose == of.purpose]
        if not stages:  # no privacy is claimed
            return chosen(of, plan, now)
        return stages[min(now.round * self.stages // self.total, self.stages - 1)], Origin.PRESET

    def _counts(self, of: TrainingReleases) -> tuple[int, ...]:
        """Steps of each stage; of a cohort's members some may release fewer."""
        ends = [-(-stage * self.total // self.stages) for stage in range(self.stages + 1)]
        if of.participations == self.total:
            return tuple(b * of.steps // self.total - a * of.steps // self.total for a, b in pairwise(ends))
        longest = -(-of.steps // of.participations)
        return tuple(longest * min(of.participations, b - a) for a, b in pairwise(ends))
