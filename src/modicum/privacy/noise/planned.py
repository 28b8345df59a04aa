"""Several kinds of noise, each for a number of participations that the plan fixes (R11)."""

from __future__ import annotations

from dataclasses import dataclass

from modicum.privacy.accounting.calibration import calibrate_kinds
from modicum.privacy.events import Origin
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases, chosen
from modicum.privacy.noise.stock import Stock
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan


@dataclass(frozen=True)
class Planned(Schedule):
    """A policy chooses the order of the kinds; all of them together cost the budget, whatever it is."""

    stock: Stock

    @property
    def scales(self) -> tuple[float, ...]:  # type: ignore[override]
        """The stock's kinds."""
        return self.stock.scales

    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        kinds = self.stock.kinds(of.participations, of.steps // of.participations)
        z = calibrate_kinds(of.spec, of.budget, of.sampler, kinds, also=also)
        return of.plan((*(of.planned(scale * z, count) for scale, count in kinds), *also))

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        if now.multiplier is not None or plan.guard is Guard.NONE:
            return chosen(of, plan, now)
        if now.kind is None:
            kind = self.stock.in_turn(of.participations, now.participation)
            return self.of_kind(of, plan, kind), Origin.PRESET
        return self.of_kind(of, plan, now.kind), Origin.PLANNED

    def of_kind(self, of: TrainingReleases, plan: PrivacyPlan, kind: int) -> float:
        if plan.guard is Guard.NONE:
            return plan.multiplier(of.purpose)
        return plan.releases[kind].noise_multiplier

    def participations(self, of: TrainingReleases) -> tuple[float, ...]:
        return self.stock.participations(of.participations)
