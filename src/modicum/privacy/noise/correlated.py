"""Noise of one party that is correlated over rounds (R19)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modicum.privacy.correlated import Correlated
from modicum.privacy.events import Origin
from modicum.privacy.noise.fixed import Fixed
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases, chosen
from modicum.privacy.plan import PlannedRelease, PrivacyPlan


@dataclass(frozen=True)
class CorrelatedNoise(Schedule):
    """What each release is worth is fixed, like its row: whatever a server says of it changes nothing (R13)."""

    rows: Correlated
    multiplier: float | None = None  # what a release is worth; None: calibrated to each client's budget

    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        plan = Fixed(self.multiplier).plan(of, also)
        first, *others = plan.releases
        terms = self.rows.terms(first.count)
        return replace(plan, releases=(replace(first, correlated=terms), *others))

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        if plan.correlation(of.purpose) is None:  # no privacy is claimed
            return chosen(of, plan, now)
        return plan.multiplier(of.purpose), Origin.PRESET
